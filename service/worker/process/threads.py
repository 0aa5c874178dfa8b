"""Threads that report an exception to the main thread, which then ends the process.

A worker that continued without one of its threads would hold claims and not serve them.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

#: The longest time between two calls of `on_wait` while waiting for the end of a thread.
WAIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ThreadDied:
    """A thread of the worker has ended with an exception."""

    name: str
    error: BaseException


class Supervised(threading.Thread):
    """Runs one part of the worker, and reports the exception if it raises.

    A daemon thread, because a thread that hangs in a device call must not keep a failed process
    alive. A normal shutdown joins every thread explicitly.
    """

    def __init__(
        self, name: str, part: Callable[[], None], *, report: Callable[[ThreadDied], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._part = part
        self._report = report

    def run(self) -> None:
        """Run the part; an exception is reported, not printed."""
        try:
            self._part()
        except BaseException as error:  # noqa: BLE001 - any exception here ends the worker.
            self._report(ThreadDied(self.name, error))

    def ends_within(self, seconds: float, *, on_wait: Callable[[], None]) -> bool:
        """Wait up to `seconds` for the thread to end; returns whether it has.

        Calls `on_wait` at least every WAIT_SECONDS meanwhile.
        """
        give_up = monotonic() + seconds
        while self.is_alive() and (left := give_up - monotonic()) > 0.0:
            on_wait()
            self.join(min(left, WAIT_SECONDS))
        return not self.is_alive()
