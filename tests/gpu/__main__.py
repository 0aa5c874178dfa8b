"""Runs the tests of the CUDA path; without a device it says so, and that is no failure.

python -m tests.gpu
"""

import sys
from importlib.util import find_spec

#: What the Python at hand has to bring; no more of the project's own requirements.
NEEDED = ("pytest", "torch", "transformers")
#: The tests that need a device, and those of the CUDA path that need none.
PATHS = ("tests/gpu", "tests/engine/model/run/test_fake_cuda.py")


def main() -> int:
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        print(f"test-gpu: {sys.executable} has no {', '.join(missing)}: nothing was run")
        return 1
    import pytest
    import torch

    if not torch.cuda.is_available():
        print(f"test-gpu: torch {torch.__version__} sees no CUDA device: nothing was run")
        return 0
    print(f"test-gpu: torch {torch.__version__} on {torch.cuda.get_device_name()}")
    return pytest.main([*pytest_arguments(), "--durations=5", *sys.argv[1:]])


def pytest_arguments() -> list[str]:
    """What to run and how; the project's own options need plugins that the machine may lack."""
    return ["-q", "-ra", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".", *PATHS]


if __name__ == "__main__":
    sys.exit(main())
