"""Runs a worker: `python -m service`. SIGTERM or SIGINT drains it; a second one skips the wait.

Exit codes: 0 drained, or stopped before it had claimed anything; 1 a thread died, or claims are
left that other workers take over; 2 invalid settings, or a model that cannot be served, a Redis
that cannot be `durable`, or a missing module; 3 a thread hung.
"""

import os
import sys

from service.shared.process import EXIT_OK, begin_log, run
from service.worker.process.signals import StopSignals

#: The longest time a thread keeps the GIL while another waits for it. With Python's default of five
#: milliseconds, a step that returns from native code would wait that long for the publisher.
SWITCH_SECONDS = 0.0005


def main() -> int:
    """Run a worker with the settings of this process; returns the exit code."""
    signals = StopSignals()
    signals.listen()
    return run("worker", lambda: _run(signals), extra="worker")


def _run(signals: StopSignals) -> int:
    from service.worker.settings.config import Settings

    settings = Settings.load()
    # Imported only here, so that `--help` and wrong settings are answered quickly.
    from service.shared.logs import warn_of_settings
    from service.worker.model.node import serves_no_requests
    from service.worker.process.follower import run_follower
    from service.worker.process.watch import Watch
    from service.worker.process.worker import Worker
    from service.worker.settings.combinations import without_effect

    if signals.are_pending:
        return EXIT_OK
    begin_log(settings, worker=settings.worker)
    warn_of_settings(without_effect(settings))
    if serves_no_requests(settings):
        # A follower holds no requests, so there is nothing to wait for.
        signals.pass_to(lambda: leave(EXIT_OK))
        return run_follower(settings)
    worker = Worker(settings)
    sys.setswitchinterval(SWITCH_SECONDS)
    signals.pass_to(worker.stop)
    # Not a part of the worker: it ends the process, and must run until the process has ended.
    Watch(worker.vitals).start()
    return worker.run()


def leave(code: int) -> None:
    """End the process now, without waiting for its threads.

    A thread that loads a model or waits for a device cannot be stopped, and the normal shutdown of
    the interpreter would crash in the native code of such a thread.
    """
    import logging

    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
