"""How long a caller still waits for an end. Knows a clock, but not what is waited for, nor how."""

from __future__ import annotations

import time

from quire.errors import WaitTimeout


class Patience:
    """Runs out `timeout` seconds after it was made; that of None never does.

    `who` has not ended when it does: a request's id, or `the group <name>`.
    """

    def __init__(self, timeout: float | None, who: str) -> None:
        self._give_up = None if timeout is None else time.monotonic() + timeout
        self._who = who

    def left(self, longest_seconds: float) -> float:
        """For how long the next read may wait, at most so long. WaitTimeout when time is up."""
        if self._give_up is None:
            return longest_seconds
        left = min(longest_seconds, self._give_up - time.monotonic())
        if left <= 0:
            raise WaitTimeout(f"{self._who} has not ended yet")
        return left
