"""Handles SIGTERM and SIGINT from the first moment, and passes them on to the worker.

Imports nothing slow. Before the handlers are installed, a signal ends the process at once; that is
acceptable only as long as the process has no work.
"""

import signal
from collections.abc import Callable

from service.shared.process import STOP_SIGNALS


class StopSignals:
    """Counts stop signals until there is a worker to pass them to. For the main thread only."""

    def __init__(self) -> None:
        self._num_early = 0
        self._stop: Callable[[], None] | None = None

    def listen(self) -> None:
        """Install the handlers: from now on a stop signal does not end the process by itself."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    @property
    def are_pending(self) -> bool:
        """Whether a signal has arrived that was not passed on yet."""
        return self._num_early > 0

    def pass_to(self, stop: Callable[[], None]) -> None:
        """Call `stop` for every signal, those that have already arrived included."""
        # In this order: `_handle` passes on a signal that arrives between the two lines.
        self._stop = stop
        early, self._num_early = self._num_early, 0
        for _ in range(early):
            stop()

    def _handle(self, *_: object) -> None:
        if self._stop is None:
            self._num_early += 1
        else:
            self._stop()
