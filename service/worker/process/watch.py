"""Ends the process when one of its threads hangs for good, so that a supervisor restarts it.

A thread that hangs in a device call, at a lock or in a socket cannot be interrupted. And not every
supervisor restarts a process when `/livez` fails. The worker's requests are taken over when its
leases expire. One case is not covered: a call that hangs while it holds the interpreter's lock
(GIL). Then this thread does not run either; `/livez` does not answer, and the leases expire, too.
"""

import logging
import os
import sys
import threading
import traceback
from _thread import start_new_thread
from collections.abc import Callable
from time import sleep

import structlog

from service.worker.observe.vitals import Silence, Vitals

#: The pause between two checks of the threads.
CHECK_SECONDS = 1.0
#: The longest time for logging the reason.
LAST_LOG_SECONDS = 2.0
#: The exit code of a worker with a thread that hangs.
EXIT_HUNG = 3

_log = structlog.get_logger("service.worker.process.watch")


def end_process(thread: str) -> None:
    """End the process at once, without any step that could hang as well.

    No drain, no call to Redis, no shutdown of the interpreter. Logging could hang, too: the thread
    may hold the lock of the log, or the pipe of the log may be full. So another thread logs the
    reason, and has LAST_LOG_SECONDS for it.
    """
    logged = threading.Event()
    try:
        # Not `Thread.start`: it waits for the new thread at a lock that all threads share.
        start_new_thread(_log_hang, (thread, logged))
        logged.wait(LAST_LOG_SECONDS)
    finally:
        os._exit(EXIT_HUNG)


class Watch:
    """Calls `end` for a thread that is overdue for as long again as its limit.

    The time is counted in checks and not taken from a clock. After a process was stopped (SIGSTOP),
    or its machine slept, all threads are overdue, but no checks were made meanwhile: so a pause of
    any length does not end the process. A sign of life between two checks resets the count.

    It takes no lock and logs nothing before the end, so that it cannot hang with the thread.
    """

    def __init__(self, vitals: Vitals, *, end: Callable[[str], None] = end_process) -> None:
        self._vitals = vitals
        self._end = end
        #: Checks since each silence was first seen.
        self._checks: dict[Silence, int] = {}

    def start(self) -> None:
        """Check from now on, until the process ends."""
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def check(self) -> None:
        """Check once. After a sign of life a thread has a new Silence, which counts from 0."""
        before = self._checks
        self._checks = {late: before.get(late, -1) + 1 for late in self._vitals.overdue}
        for late, num_checks in self._checks.items():
            if num_checks * CHECK_SECONDS >= late.limit_seconds:
                self._end(late.thread)
                return

    def _run(self) -> None:
        while True:
            sleep(CHECK_SECONDS)
            self.check()


def _log_hang(thread: str, logged: threading.Event) -> None:
    """Log which thread hangs, and its stack, which contains lines of code and no values."""
    try:
        idents = {known.name: known.ident for known in threading.enumerate()}
        idents["main"] = threading.main_thread().ident
        frame = sys._current_frames().get(idents.get(thread) or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        _log.critical("worker hangs", thread=thread, exit_code=EXIT_HUNG, stack=stack)
        logging.shutdown()
    finally:
        logged.set()
