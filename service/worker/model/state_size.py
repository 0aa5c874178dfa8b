"""Prints the bytes of the recurrent state of the model in a folder.

    python -m service.worker.model.state_size FOLDER

`quire doctor` runs it in a process of its own, since it loads torch and transformers.
"""

import sys
from pathlib import Path

from engine.errors import ModelRefused
from engine.model.wide.state_size import bytes_of_state


def main(arguments: list[str]) -> int:
    """Print the number on standard output, or why it is unknown on the standard error stream."""
    (folder,) = arguments
    try:
        sys.stdout.write(f"{bytes_of_state(Path(folder))}\n")
    except ModelRefused as refused:
        sys.stderr.write(f"{refused}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
