"""Runs the exporter: `python -m service.exporter`. SIGTERM and SIGINT end it.

Exit codes: 0 ended by a signal; 2 invalid settings, or a Python module is missing.
"""

import signal
import sys

from service.shared.process import EXIT_OK, STOP_SIGNALS, begin_log, run


def main() -> int:
    """Export until a stop signal; returns the exit code."""
    return run("exporter", _run, extra="gateway", held=STOP_SIGNALS)


def _run() -> int:
    from service.exporter.settings import ExporterSettings

    settings = ExporterSettings.load()
    # Imported only here, so that `--help` and wrong settings are answered quickly.
    import structlog

    from service.exporter.queues import Exporter

    begin_log(settings)
    exporter = Exporter(settings)
    log = structlog.get_logger("service.exporter")
    exporter.start()
    log.info(
        "exporter ready",
        queues=list(settings.queues),
        http_host=settings.http_host,
        http_port=exporter.http_port,
    )
    signal.sigwait(STOP_SIGNALS)
    exporter.stop()
    log.info("exporter stopped")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
