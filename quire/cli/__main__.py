"""Runs the `quire` command as `python -m quire.cli`."""

import sys

from quire.cli import main

if __name__ == "__main__":
    sys.exit(main())
