"""Runs a worker: `python -m service`. SIGTERM and SIGINT drain it, a second one hurries it up."""

import signal
import sys

from service.config import load_settings
from service.sources import ConfigurationError

#: Exit code of a command line, environment or file that cannot be right.
EXIT_USAGE = 2


def main() -> int:
    """Run a worker with the settings of this process; returns the exit code."""
    try:
        settings = load_settings()
        # Only now: `--help` and mistakes are answered without loading the rest.
        from service.logs import configure_logs
        from service.worker import Worker

        configure_logs(level=settings.log_level, style=settings.log_format)
        worker = Worker(settings)
    except ConfigurationError as error:
        sys.stderr.write(f"configuration: {error}\n")
        return EXIT_USAGE
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    return worker.run()


if __name__ == "__main__":
    sys.exit(main())
