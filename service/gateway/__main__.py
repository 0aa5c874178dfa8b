"""Runs a gateway: `python -m service.gateway`.

SIGTERM and SIGINT drain it. SIGHUP makes it read its file of keys again.

Exit codes: 0 drained; 2 invalid settings, or a Python module is missing.
"""

import asyncio
import gc
import signal
import sys

from service.shared.process import EXIT_OK, begin_log, run

#: Thresholds of Python's cyclic garbage collector. Open streams are many long-lived objects. With
#: the default thresholds, scanning them takes a fifth of a busy gateway's time.
GC_THRESHOLDS = (20_000, 20, 100)


def main() -> int:
    """Run a gateway with the settings of this process; returns the exit code."""
    # By default SIGHUP ends the process.
    return run("gateway", _run, extra="gateway", held={signal.SIGHUP})


def _run() -> int:
    from service.gateway.settings import GatewaySettings

    settings = GatewaySettings.load()
    # Imported only here, so that `--help` and wrong settings are answered quickly.
    from service.gateway.server import GatewayServer

    begin_log(settings)
    server = GatewayServer(settings)
    gc.set_threshold(*GC_THRESHOLDS)
    asyncio.run(server.run())
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
