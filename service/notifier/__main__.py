"""Runs a notifier: `python -m service.notifier`. SIGTERM and SIGINT end it.

Exit codes: 0 ended by a signal; 2 invalid settings, or a Python module is missing.
"""

import asyncio
import os
import sys

#: Exit code for an invalid command line, environment or file.
EXIT_USAGE = 2
#: The extra that installs every package a notifier imports.
NOTIFIER_EXTRA = "the extra `notifier`: pip install -c constraints.txt -e '.[notifier]'"


def main() -> int:
    """Run a notifier with the settings of this process; returns the exit code."""
    try:
        return _run()
    except ModuleNotFoundError as error:
        missing = f"the module {error.name} is missing"
        sys.stderr.write(f"installation: {missing}; a notifier needs {NOTIFIER_EXTRA}\n")
        return EXIT_USAGE


def _run() -> int:
    from service.notifier.endpoints import read_endpoints
    from service.notifier.notifier import Notifier
    from service.notifier.settings import NotifierSettings
    from service.shared.logs import configure_logs, warn_of_settings
    from service.shared.settings.sources import ConfigurationError

    try:
        settings = NotifierSettings.load()
        configure_logs(level=settings.log_level, style=settings.log_format)
        warn_of_settings(NotifierSettings.unknown_variables(os.environ))
        endpoints = read_endpoints(settings.endpoints_file, allows_http=settings.allows_http)
        notifier = Notifier(settings, endpoints)
    except ConfigurationError as error:
        sys.stderr.write(f"configuration: {error}\n")
        return EXIT_USAGE
    asyncio.run(notifier.run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
