"""Runs a gateway: `python -m service.gateway`.

SIGTERM and SIGINT drain it. SIGHUP makes it read its file of keys again.

Exit codes: 0 drained; 2 invalid settings, or a Python module is missing.
"""

import asyncio
import gc
import os
import signal
import sys

#: Exit code for an invalid command line, environment or file.
EXIT_USAGE = 2
#: The extra that installs every package a gateway imports.
GATEWAY_EXTRA = "the extra `gateway`: pip install -c constraints.txt -e '.[gateway]'"

#: Thresholds of Python's cyclic garbage collector. Open streams are many long-lived objects. With
#: the default thresholds, scanning them takes a fifth of a busy gateway's time.
GC_THRESHOLDS = (20_000, 20, 100)


def main() -> int:
    """Run a gateway with the settings of this process; returns the exit code."""
    # By default SIGHUP ends the process. While it is blocked, it stays pending until the handler
    # is installed.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        return _run()
    except ModuleNotFoundError as error:
        missing = f"the module {error.name} is missing"
        sys.stderr.write(f"installation: {missing}; a gateway needs {GATEWAY_EXTRA}\n")
        return EXIT_USAGE


def _run() -> int:
    from service.gateway.settings import GatewaySettings
    from service.shared.settings.sources import ConfigurationError

    try:
        settings = GatewaySettings.load()
        # Imported only here, so that `--help` and wrong settings are answered quickly.
        from service.gateway.server import GatewayServer
        from service.shared.logs import configure_logs, warn_of_settings

        configure_logs(level=settings.log_level, style=settings.log_format)
        warn_of_settings(GatewaySettings.unknown_variables(os.environ))
        server = GatewayServer(settings)
    except ConfigurationError as error:
        sys.stderr.write(f"configuration: {error}\n")
        return EXIT_USAGE
    gc.set_threshold(*GC_THRESHOLDS)
    asyncio.run(server.run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
