"""How long a caller still waits for an end. Knows a clock, but not what is waited for, nor how.

It also decides how long a wait goes on while Redis does not answer, and when it is time to look for
the reason why nothing comes.
"""

from __future__ import annotations

import logging
import time

from quire.errors import BrokerUnavailable, WaitTimeout
from quire.transport.connection import may_pass

#: For how long a read waits, in seconds, when the moment to look has passed: to Redis, no time is
#: for ever.
AT_ONCE = 0.001

#: A wait without a timeout goes on for this many times the broker's `retry_seconds` while Redis
#: does not answer: for a minute, unless that is set.
OUTAGE_RETRIES = 30

#: The pause between two tries while Redis does not answer; each try repeats its call by itself.
AGAIN_SECONDS = 0.25

#: A wait that has brought nothing for so long looks once for what is missing.
NOTE_SECONDS = 1.0

#: How long the last look of a wait may take that is over by then.
LAST_LOOK_SECONDS = 1.0

_log = logging.getLogger("quire")


class Patience:
    """Runs out `timeout` seconds after it was made; that of None never does.

    `who` has not ended when it does: a request's id, or `the group <name>`. Without a timeout, an
    outage of Redis is borne for `outage_seconds`, if Redis has answered this wait before or
    `has_answered` says so: otherwise its address may be wrong. A wait that `explains` looks once
    for the reason why nothing comes, and logs it.
    """

    def __init__(
        self,
        timeout: float | None,
        who: str,
        *,
        outage_seconds: float = 0.0,
        has_answered: bool = False,
        explains: bool = True,
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
        self._reason = ""

    def look_in(self, seconds: float | None) -> None:
        """From now on a read that is waiting then comes back; None for no such moment."""
        self._look_at = None if seconds is None else time.monotonic() + seconds

    def left(self, longest_seconds: float) -> float:
        """For how long the next read may wait, at most so long. WaitTimeout when time is up."""
        now, left = time.monotonic(), longest_seconds
        if self._look_at is not None:
            left = min(left, max(self._look_at - now, AT_ONCE))
        # Once that moment has passed, the look comes with the next read that finds nothing.
        if self._explain_at is not None and self._explain_at > now:
            left = min(left, self._explain_at - now)
        if self._give_up is None:
            return left
        left = min(left, self._give_up - now)
        if left <= 0:
            raise self._timeout() from self._outage
        return left

    @property
    def longest_call(self) -> float | None:
        """For how long a call may last that can be broken off; None for as long as it likes.

        A wait that is over looks for the last time, and needs a moment for that.
        """
        if self._give_up is None:
            return None
        return max(0.0, self._give_up - time.monotonic()) + LAST_LOOK_SECONDS

    def answered(self) -> None:
        """Redis has answered."""
        self._has_answered = True
        self._away_since = self._outage = None

    def bear(self, error: BrokerUnavailable) -> float:
        """Seconds until the next try of a read that failed like this.

        Raises the error if it cannot pass by itself or has lasted too long, and WaitTimeout when
        time is up. Only for what may be repeated.
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
        """Whether it is time to look, once, for the reason why nothing comes.

        That is after NOTE_SECONDS, or when a shorter wait is over.
        """
        if self._explain_at is None:
            return False
        moments = [self._explain_at] if self._give_up is None else [self._explain_at, self._give_up]
        return time.monotonic() >= min(moments)

    def explain(self, reason: str | None) -> None:
        """Nothing comes for this reason; None where none is known.

        It is in the text of a WaitTimeout, and logged, unless the wait is over already.
        """
        is_over = self._give_up is not None and time.monotonic() >= self._give_up
        self._explain_at = None
        if reason:
            self._reason = reason
            if not is_over:
                _log.warning("%s waits: %s", self._who, reason)

    def has_news(self) -> None:
        """Something has come: there is nothing to explain."""
        self._explain_at = None

    def _timeout(self) -> WaitTimeout:
        told = f"{self._who} has not ended yet"
        if self._outage is not None:
            return WaitTimeout(f"{told}, and Redis does not answer: {self._outage}")
        return WaitTimeout(f"{told}: {self._reason}" if self._reason else told)
