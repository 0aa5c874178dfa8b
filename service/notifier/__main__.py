"""Runs a notifier: `python -m service.notifier`. SIGTERM and SIGINT end it.

Exit codes: 0 ended by a signal; 2 invalid settings, or a Python module is missing.
"""

import asyncio
import sys

from service.shared.process import EXIT_OK, begin_log, run


def main() -> int:
    """Run a notifier with the settings of this process; returns the exit code."""
    return run("notifier", _run, extra="notifier")


def _run() -> int:
    from service.notifier.settings import NotifierSettings

    settings = NotifierSettings.load()
    # Imported only here, so that `--help` and wrong settings are answered quickly.
    from service.notifier.endpoints import read_endpoints
    from service.notifier.notifier import Notifier

    begin_log(settings)
    endpoints = read_endpoints(settings.endpoints_file, allows_http=settings.allows_http)
    asyncio.run(Notifier(settings, endpoints).run())
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
