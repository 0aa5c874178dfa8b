"""Hears SIGTERM and SIGINT from the first moment, and passes them on once there is a worker.

Imports nothing that takes time. Until somebody listens, a signal ends the process by the system's
default, and that must be so only while the process has nothing to lose.
"""

import signal
from collections.abc import Callable

#: What asks a worker to end.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Keeps the signals that come too early, for whoever can act on them. For the main thread."""

    def __init__(self) -> None:
        self._num_early = 0
        self._stop: Callable[[], None] | None = None

    def listen(self) -> None:
        """From now on no stop signal ends the process by itself."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._hear)

    @property
    def were_heard(self) -> bool:
        """One came, and nobody has acted on it yet."""
        return self._num_early > 0

    def pass_to(self, stop: Callable[[], None]) -> None:
        """Call `stop` for every signal, those that have come before included."""
        # In this order: a signal that comes between the two lines is passed on by `_hear`.
        self._stop = stop
        early, self._num_early = self._num_early, 0
        for _ in range(early):
            stop()

    def _hear(self, *_: object) -> None:
        if self._stop is None:
            self._num_early += 1
        else:
            self._stop()
