"""Runs a console: `python -m service.console`. SIGTERM and SIGINT end it.

SIGHUP makes it read its file of users again.

Exit codes: 0 ended by a signal; 2 invalid settings, or a Python module is missing.
"""

import asyncio
import os
import signal
import sys

#: Exit code for an invalid command line, environment or file.
EXIT_USAGE = 2
#: The extra that installs every package a console imports.
CONSOLE_EXTRA = "the extra `console`: pip install -c constraints.txt -e '.[console]'"


def main() -> int:
    """Run a console with the settings of this process; returns the exit code."""
    # By default SIGHUP ends the process. While it is blocked, it stays pending until the handler
    # is installed.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        return _run()
    except ModuleNotFoundError as error:
        missing = f"the module {error.name} is missing"
        sys.stderr.write(f"installation: {missing}; a console needs {CONSOLE_EXTRA}\n")
        return EXIT_USAGE


def _run() -> int:
    from service.console.settings import ConsoleSettings
    from service.shared.settings.sources import ConfigurationError

    try:
        settings = ConsoleSettings.load()
        # Imported only here, so that `--help` and wrong settings are answered quickly.
        from service.console.server import ConsoleServer
        from service.shared.logs import configure_logs, warn_of_settings

        configure_logs(level=settings.log_level, style=settings.log_format)
        warn_of_settings(ConsoleSettings.unknown_variables(os.environ))
        server = ConsoleServer(settings)
    except ConfigurationError as error:
        sys.stderr.write(f"configuration: {error}\n")
        return EXIT_USAGE
    asyncio.run(server.run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
