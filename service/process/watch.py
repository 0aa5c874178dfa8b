"""Ends the process when one of its threads hangs for good, so that its supervisor starts another.

A thread that hangs in a call of its device, at a lock or in a socket cannot be interrupted, and not
everything that runs workers restarts those whose `/livez` fails. What the worker held is taken over
as its leases expire. One case is beyond it: a call that hangs while it holds the interpreter's lock
(GIL). Then nothing here runs; `/livez` is not answered, and the leases expire as well.
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

from service.observe.vitals import Silence, Vitals

#: Between two looks at the threads.
LOOK_SECONDS = 1.0
#: How long writing the reason to the log may take.
LAST_WORDS_SECONDS = 2.0
#: The exit code of a worker that hung.
EXIT_HUNG = 3

_log = structlog.get_logger("service.process.watch")


def end_process(thread: str) -> None:
    """End the process at once, without anything that could hang as well.

    No drain, no call to Redis, no shutdown of the interpreter. The thread that hangs may hold the
    log's lock, or the pipe that the log goes to may be full: so another thread logs the reason, and
    gets LAST_WORDS_SECONDS for it.
    """
    said = threading.Event()
    try:
        # `Thread.start` would wait for the new thread, at a lock that all threads share.
        start_new_thread(_log_hang, (thread, said))
        said.wait(LAST_WORDS_SECONDS)
    finally:
        os._exit(EXIT_HUNG)


class Watch:
    """Calls `end` for a thread that has been overdue for as long again as it may be silent.

    That time is counted in looks, not read off a clock. A process that was stopped, or whose
    machine slept, finds all of its threads overdue when it wakes up, but has not looked meanwhile:
    so standing still, for however long, does not end it. Nor does a thread that shows any sign of
    life between two looks.

    It takes no lock and logs nothing before the end: what hangs must not make it hang.
    """

    def __init__(self, vitals: Vitals, *, end: Callable[[str], None] = end_process) -> None:
        self._vitals = vitals
        self._end = end
        #: Looks since each silence was first seen.
        self._looks: dict[Silence, int] = {}

    def start(self) -> None:
        """Look from now on, until the process ends."""
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def look(self) -> None:
        """One look. The count of a thread that has shown a sign of life since begins anew."""
        before = self._looks
        self._looks = {late: before.get(late, -1) + 1 for late in self._vitals.overdue}
        for late, looks in self._looks.items():
            if looks * LOOK_SECONDS >= late.limit_seconds:
                self._end(late.thread)
                return

    def _run(self) -> None:
        while True:
            sleep(LOOK_SECONDS)
            self.look()


def _log_hang(thread: str, said: threading.Event) -> None:
    """Log which thread hangs, and where: its stack holds lines of code and no values."""
    try:
        idents = {known.name: known.ident for known in threading.enumerate()}
        idents["main"] = threading.main_thread().ident
        frame = sys._current_frames().get(idents.get(thread) or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        _log.critical("worker hangs", thread=thread, exit_code=EXIT_HUNG, stack=stack)
        logging.shutdown()
    finally:
        said.set()
