"""Runs a console: `python -m service.console`. SIGTERM and SIGINT end it.

SIGHUP makes it read its file of users again.

Exit codes: 0 ended by a signal; 2 invalid settings, or a Python module is missing.
"""

import asyncio
import signal
import sys

from service.shared.process import EXIT_OK, begin_log, run


def main() -> int:
    """Run a console with the settings of this process; returns the exit code."""
    # By default SIGHUP ends the process.
    return run("console", _run, extra="console", held={signal.SIGHUP})


def _run() -> int:
    from service.console.settings import ConsoleSettings

    settings = ConsoleSettings.load()
    # Imported only here, so that `--help` and wrong settings are answered quickly.
    from service.console.server import ConsoleServer

    begin_log(settings)
    asyncio.run(ConsoleServer(settings).run())
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
