"""Runs a worker: `python -m service`. SIGTERM and SIGINT drain it, a second one hurries it up.

Exit codes: 0 drained, or stopped before it had taken anything; 1 a part of it died, or work was
left behind that leases hand over; 2 settings that cannot be right, or a model, a promise or a
module that cannot be had here; 3 a part of it hung.
"""

import os
import sys

from service.process.signals import StopSignals

#: How long a thread may hold the interpreter while another waits for it. A step that comes back
#: from native code must not stand behind the publisher for the five milliseconds of the default.
SWITCH_SECONDS = 0.0005
#: The worker's exit code when it was stopped before there was a worker.
EXIT_OK = 0
#: Exit code of a command line, environment or file that cannot be right.
EXIT_USAGE = 2
#: What brings everything that a worker imports.
WORKER_EXTRA = "the extra `worker`: pip install -c constraints.txt -e '.[worker]'"


def main() -> int:
    """Run a worker with the settings of this process; returns the exit code."""
    signals = StopSignals()
    signals.listen()
    try:
        return _run(signals)
    except ModuleNotFoundError as error:
        # The client alone is installed, as by `pip install .`.
        missing = f"the module {error.name} is missing"
        sys.stderr.write(f"installation: {missing}; a worker needs {WORKER_EXTRA}\n")
        return EXIT_USAGE


def _run(signals: StopSignals) -> int:
    # Only now: these imports take a second, and a signal may come at any moment of it.
    from service.settings.config import load_settings
    from service.settings.sources import ConfigurationError

    try:
        settings = load_settings()
        # `--help` and mistakes are answered without loading the rest.
        from service.process.watch import Watch
        from service.process.worker import Worker
        from service.settings.combinations import without_effect
        from service.settings.logs import configure_logs, warn_of_settings

        if signals.were_heard:
            return EXIT_OK
        configure_logs(level=settings.log_level, style=settings.log_format, worker=settings.worker)
        warn_of_settings(settings.unknown_variables(os.environ))
        warn_of_settings(without_effect(settings))
        worker = Worker(settings)
    except ConfigurationError as error:
        sys.stderr.write(f"configuration: {error}\n")
        return EXIT_USAGE
    sys.setswitchinterval(SWITCH_SECONDS)
    signals.pass_to(worker.stop)
    # Here and not in the worker: it ends the process, and looks on until that has ended.
    Watch(worker.vitals).start()
    return worker.run()


def leave(code: int) -> None:
    """End the process now, whatever its threads are at.

    One that loads a model or waits for a device cannot be asked to stop, and the interpreter's own
    farewell crashes in the native code of such a thread.
    """
    import logging

    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
