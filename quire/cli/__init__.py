"""The `quire` command: runs a command line and returns an exit code; no traceback on Ctrl-C.

Exit codes: 0 success, 1 failure, 2 the command line or a request is invalid, 3 some of several
items failed, 130 interrupted. Data goes to stdout, everything else to stderr.

Imports nothing before `main` runs, so that an interruption during the imports prints no traceback.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code."""
    try:
        from quire.cli.verbs import run

        return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        from quire.cli.exit_codes import EXIT_INTERRUPTED

        return EXIT_INTERRUPTED
