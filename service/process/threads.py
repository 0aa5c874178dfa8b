"""Threads that report their own death: a worker with one thread missing is worse than none.

A part of the worker that raises is reported to the worker, which then ends the process.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

#: The longest time between two calls of `on_turn` while waiting for the end of a thread.
TURN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ThreadDied:
    """A thread of the worker ended by an exception."""

    name: str
    error: BaseException


class Supervised(threading.Thread):
    """Runs one part of the worker, and reports the exception if it raises.

    Daemonic, because a thread stuck in a device call must not keep a failed process alive; an
    orderly shutdown joins every thread explicitly.
    """

    def __init__(
        self, name: str, part: Callable[[], None], *, report: Callable[[ThreadDied], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._part = part
        self._report = report

    def run(self) -> None:
        """Run the part; anything it raises is reported, not printed."""
        try:
            self._part()
        except BaseException as error:  # noqa: BLE001 - whatever ended the thread ends the worker.
            self._report(ThreadDied(self.name, error))

    def ends_within(self, seconds: float, *, on_turn: Callable[[], None]) -> bool:
        """Wait up to `seconds` for the thread's end, calling `on_turn` now and then; True if so."""
        give_up = monotonic() + seconds
        while self.is_alive() and (left := give_up - monotonic()) > 0.0:
            on_turn()
            self.join(min(left, TURN_SECONDS))
        return not self.is_alive()
