"""How long a caller waits. Knows a clock, but not what the caller waits for.

It also decides how long a wait continues while Redis does not answer, and when to find out why
there is no news.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from quire.errors import BrokerUnavailable, WaitTimeout
from quire.transport.connection import may_pass

#: How many seconds a read waits if the time for the next look has passed. Not 0: Redis would block
#: for ever.
AT_ONCE = 0.001

#: While Redis does not answer, a wait without a timeout continues for this many times the broker's
#: `retry_seconds`: by default for a minute.
OUTAGE_RETRIES = 30

#: The pause between two attempts while Redis does not answer; each attempt retries its call, too.
AGAIN_SECONDS = 0.25

#: After so long without news, a wait finds out once what is missing.
NOTE_SECONDS = 1.0

#: How long the last look may take after the timeout of a wait.
LAST_LOOK_SECONDS = 1.0

_log = logging.getLogger("quire")


class Patience:
    """Runs out `timeout` seconds after it was made; with None never.

    `who` is named in messages: a request's id, or `the group <name>`. Without a timeout, a wait
    continues through an outage of Redis for `outage_seconds`, but only if Redis has answered
    before (`has_answered`, or during this wait): otherwise its address may be wrong. A wait that
    `explains` finds out once why there is no news, and logs the reason. With `again_seconds` it
    does so again after so long without news: a wait for many ends may come to a halt in the middle.
    `so_far` tells a WaitTimeout what has ended.
    """

    def __init__(
        self,
        timeout: float | None,
        who: str,
        *,
        outage_seconds: float = 0.0,
        has_answered: bool = False,
        explains: bool = True,
        again_seconds: float | None = None,
        so_far: Callable[[], str] | None = None,
    ) -> None:
        now = time.monotonic()
        self._give_up = None if timeout is None else now + timeout
        self._look_at: float | None = None
        self._who = who
        self._outage_seconds = outage_seconds
        self._has_answered = has_answered
        self._away_since: float | None = None
        self._outage: BrokerUnavailable | None = None
        self._explain_at = now + NOTE_SECONDS if explains else None
        self._again_seconds = again_seconds
        self._so_far = so_far
        self._has_last_look = False
        self._reason = ""

    def look_in(self, seconds: float | None) -> None:
        """A waiting read should return after so many seconds; None for no such time."""
        self._look_at = None if seconds is None else time.monotonic() + seconds

    def left(self, longest_seconds: float) -> float:
        """For how many seconds the next read may wait, at most. WaitTimeout if time is up.

        A wait that has not found out yet what is missing gets one more read, which does not wait.
        """
        now, left = time.monotonic(), longest_seconds
        if self._look_at is not None:
            left = min(left, max(self._look_at - now, AT_ONCE))
        # After that time, the next read without news is followed by the look.
        if self._explain_at is not None and self._explain_at > now:
            left = min(left, self._explain_at - now)
        if self._give_up is None:
            return left
        left = min(left, self._give_up - now)
        if left > 0:
            return left
        # Time may run out between `is_to_explain` and now. One more read is followed by the look.
        is_unexplained = self._explain_at is not None and self._outage is None
        if not is_unexplained or self._has_last_look or not longest_seconds:
            raise self._timeout() from self._outage
        self._has_last_look = True
        return AT_ONCE

    @property
    def longest_call(self) -> float | None:
        """For how many seconds a call may last, if the caller can stop it; None for no limit.

        Includes the time for the last look of a wait whose time is up.
        """
        if self._give_up is None:
            return None
        return max(0.0, self._give_up - time.monotonic()) + LAST_LOOK_SECONDS

    def answered(self) -> None:
        """Notes that Redis has answered."""
        self._has_answered = True
        self._away_since = self._outage = None

    def bear(self, error: BrokerUnavailable) -> float:
        """Seconds until the next attempt of a read that failed with this error.

        Raises the error if it cannot pass by itself or has lasted too long. WaitTimeout if time is
        up. Only for what may be repeated.
        """
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
        if not may_pass(error):
            raise error
        if self._give_up is None:
            is_borne = now - self._away_since < self._outage_seconds
            if not self._has_answered or not is_borne:
                raise error
            return AGAIN_SECONDS
        self._outage = error
        return self.left(AGAIN_SECONDS)

    @property
    def is_to_explain(self) -> bool:
        """Whether it is time to find out, once, why there is no news.

        That is after NOTE_SECONDS, or when a shorter timeout is over.
        """
        if self._explain_at is None:
            return False
        moments = [self._explain_at] if self._give_up is None else [self._explain_at, self._give_up]
        return time.monotonic() >= min(moments)

    def explain(self, reason: str | None) -> None:
        """Sets the reason why there is no news; None if it is unknown.

        The reason is part of a WaitTimeout's message, and is logged unless time is up.
        """
        now = time.monotonic()
        is_over = self._give_up is not None and now >= self._give_up
        self._explain_again(now)
        if reason:
            self._reason = reason
            if not is_over:
                _log.warning("%s waits: %s", self._who, reason)

    def has_news(self) -> None:
        """Notes that there was news: there is nothing to explain."""
        self._explain_again(time.monotonic())
        self._reason = ""

    def _explain_again(self, now: float) -> None:
        self._explain_at = None if self._again_seconds is None else now + self._again_seconds

    def _timeout(self) -> WaitTimeout:
        message = f"{self._who} has not ended yet"
        if self._so_far is not None:
            message += f" ({self._so_far()})"
        if self._outage is not None:
            return WaitTimeout(f"{message}, and Redis does not answer: {self._outage}")
        return WaitTimeout(f"{message}: {self._reason}" if self._reason else message)
