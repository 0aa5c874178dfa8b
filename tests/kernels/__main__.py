"""Runs the tests of the Triton kernels, which need Triton and no device. None is ever skipped.

python -m tests.kernels
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
#: The files in their order, and whether Triton interprets: it decides so once in a process.
FILES = {
    "check_compiled.py": "0",
    "check_refused.py": "0",
    "check_interpreted.py": "1",
    "check_draws.py": "1",
}
#: Triton's interpreter cannot loop over tensors with this version of numpy and later ones.
TOO_NEW = "2.4.0"


def main() -> int:
    if find_spec("triton") is None:
        print(f"test-kernels: {sys.executable} has no triton: nothing was run")
        return 1
    if np.lib.NumpyVersion(np.__version__) >= TOO_NEW:
        print(f"test-kernels: Triton's interpreter needs a numpy before {TOO_NEW}: nothing was run")
        return 1
    return max(
        run([str(FOLDER / name) for name in FILES if FILES[name] == interprets], interprets)
        for interprets in ("0", "1")
    )


def run(files: list[str], interprets: str) -> int:
    """Runs the files in one process; returns its exit code, or 1 if a test was skipped."""
    command = [
        *(sys.executable, "-m", "pytest", "-o", "python_files=check_*.py"),
        *("--timeout", "600", "--durations", "5", *files, *sys.argv[1:]),
    ]
    environment = os.environ | {"TRITON_INTERPRET": interprets}
    ended = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert ended.stdout is not None
    has_skipped = False
    for line in ended.stdout:
        print(line, end="", flush=True)
        has_skipped |= line.startswith("SKIPPED")
    return ended.wait() or int(has_skipped)


if __name__ == "__main__":
    sys.exit(main())
