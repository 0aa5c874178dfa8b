"""How long a caller still waits for an end. Knows a clock, but not what is waited for, nor how."""

from __future__ import annotations

import time

from quire.errors import WaitTimeout

#: For how long a read waits, in seconds, when the moment to look has passed: to Redis, no time is
#: for ever.
AT_ONCE = 0.001


class Patience:
    """Runs out `timeout` seconds after it was made; that of None never does.

    `who` has not ended when it does: a request's id, or `the group <name>`.
    """

    def __init__(self, timeout: float | None, who: str) -> None:
        self._give_up = None if timeout is None else time.monotonic() + timeout
        self._look_at: float | None = None
        self._who = who

    def look_in(self, seconds: float | None) -> None:
        """From now on a read that is waiting then comes back; None for no such moment."""
        self._look_at = None if seconds is None else time.monotonic() + seconds

    def left(self, longest_seconds: float) -> float:
        """For how long the next read may wait, at most so long. WaitTimeout when time is up."""
        now, left = time.monotonic(), longest_seconds
        if self._look_at is not None:
            left = min(left, max(self._look_at - now, AT_ONCE))
        if self._give_up is None:
            return left
        left = min(left, self._give_up - now)
        if left <= 0:
            raise WaitTimeout(f"{self._who} has not ended yet")
        return left
