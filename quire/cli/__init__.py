"""The `quire` command: turns a command line into an exit code, and an interruption into silence.

Exit codes: 0 done, 1 it failed, 2 the command line or a request cannot be right, 3 some of several
things failed, 130 interrupted. Data goes to stdout, everything else to stderr.

Loads nothing before `main` runs: whoever interrupts a command in its first moments would be shown
a traceback of whatever was being loaded.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_PARTIAL = 3
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code."""
    try:
        from quire.cli.verbs import run

        return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
