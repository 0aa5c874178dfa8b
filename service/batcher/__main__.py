"""Runs a batcher: `python -m service.batcher`.

SIGTERM and SIGINT save the open batches and give them to other batchers.

Exit codes: 0 drained; 1 a batch could not be given back in time; 2 invalid settings, or a Python
module is missing.
"""

import os
import signal
import sys

#: Exit code for an invalid command line, environment or file.
EXIT_USAGE = 2
#: Exit code if batches were left behind; they go on after their lease.
EXIT_LEFT = 1
#: The signals that drain a batcher.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: The extra that installs every package a batcher imports.
BATCHER_EXTRA = "the extra `gateway`: pip install -c constraints.txt -e '.[gateway]'"


def main() -> int:
    """Run a batcher with the settings of this process; returns the exit code."""
    # Blocked before threads start, so that only `sigwait` receives them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return _run()
    except ModuleNotFoundError as error:
        missing = f"the module {error.name} is missing"
        sys.stderr.write(f"installation: {missing}; a batcher needs {BATCHER_EXTRA}\n")
        return EXIT_USAGE


def _run() -> int:
    from service.batcher.settings import BatcherSettings
    from service.shared.settings.sources import ConfigurationError

    try:
        settings = BatcherSettings.load()
        # Imported only here, so that `--help` and wrong settings are answered quickly.
        import structlog

        from service.batcher.batcher import Batcher
        from service.shared.logs import configure_logs, warn_of_settings

        configure_logs(level=settings.log_level, style=settings.log_format)
        warn_of_settings(BatcherSettings.unknown_variables(os.environ))
        batcher = Batcher(settings)
    except ConfigurationError as error:
        sys.stderr.write(f"configuration: {error}\n")
        return EXIT_USAGE
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
    return 0 if has_drained else EXIT_LEFT


if __name__ == "__main__":
    sys.exit(main())
