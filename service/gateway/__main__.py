"""Runs a gateway: `python -m service.gateway`. SIGTERM and SIGINT drain it, SIGHUP reads its keys.

Exit codes: 0 drained; 2 settings that cannot be right, or a module that is missing.
"""

import asyncio
import gc
import os
import signal
import sys

#: Exit code of a command line, environment or file that cannot be right.
EXIT_USAGE = 2
#: What brings everything that a gateway imports.
GATEWAY_EXTRA = "the extra `gateway`: pip install -c constraints.txt -e '.[gateway]'"

#: When Python looks for garbage in cycles. Open streams are many objects that stay: looked through
#: as often as is usual, they take a fifth of a busy gateway's time.
GC_THRESHOLDS = (20_000, 20, 100)


def main() -> int:
    """Run a gateway with the settings of this process; returns the exit code."""
    # It would end a process that does not hear it yet. Kept back, it is heard once that is ready.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        return _run()
    except ModuleNotFoundError as error:
        missing = f"the module {error.name} is missing"
        sys.stderr.write(f"installation: {missing}; a gateway needs {GATEWAY_EXTRA}\n")
        return EXIT_USAGE


def _run() -> int:
    from service.gateway.settings import GatewaySettings, load_gateway_settings
    from service.settings.sources import ConfigurationError

    try:
        settings = load_gateway_settings()
        # `--help` and mistakes are answered without loading the rest.
        from service.gateway.http.server import Server
        from service.settings.logs import configure_logs, warn_of_settings

        configure_logs(level=settings.log_level, style=settings.log_format)
        warn_of_settings(GatewaySettings.unknown_variables(os.environ))
        server = Server(settings)
    except ConfigurationError as error:
        sys.stderr.write(f"configuration: {error}\n")
        return EXIT_USAGE
    gc.set_threshold(*GC_THRESHOLDS)
    asyncio.run(server.run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
