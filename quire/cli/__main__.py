"""Lets `python -m quire.cli` be the `quire` command."""

import sys

from quire.cli import main

if __name__ == "__main__":
    sys.exit(main())
