"""Runs a batcher: `python -m service.batcher`.

SIGTERM and SIGINT save the open batches and give them to other batchers.

Exit codes: 0 drained; 1 a batch could not be given back in time; 2 invalid settings, or a Python
module is missing.
"""

import signal
import sys

from service.shared.process import EXIT_OK, STOP_SIGNALS, begin_log, run

#: Exit code if batches were left behind; they go on after their lease.
EXIT_LEFT = 1


def main() -> int:
    """Run a batcher with the settings of this process; returns the exit code."""
    return run("batcher", _run, extra="gateway", held=STOP_SIGNALS)


def _run() -> int:
    from service.batcher.settings import BatcherSettings

    settings = BatcherSettings.load()
    # Imported only here, so that `--help` and wrong settings are answered quickly.
    import structlog

    from service.batcher.batcher import Batcher

    begin_log(settings)
    batcher = Batcher(settings)
    log = structlog.get_logger("service.batcher")
    batcher.start()
    log.info(
        "batcher ready",
        queue=settings.queue,
        http_host=settings.http_host,
        http_port=batcher.http_port,
    )
    signal.sigwait(STOP_SIGNALS)
    log.info("draining")
    has_drained = batcher.stop()
    log.info("drained", complete=has_drained)
    return EXIT_OK if has_drained else EXIT_LEFT


if __name__ == "__main__":
    sys.exit(main())
