"""Runs the tests of the CUDA path; without a device it says so, and that is no failure.

python -m tests.gpu
"""

import sys
from importlib.util import find_spec

#: What the Python at hand has to bring; no more of the project's own requirements.
NEEDED = ("pytest", "torch", "transformers")


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
    arguments = ["--durations=5", "tests/gpu", *sys.argv[1:]]
    # The project's own options want plugins that a bare machine may not have.
    return pytest.main(
        ["-q", "-ra", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".", *arguments]
    )


if __name__ == "__main__":
    sys.exit(main())
