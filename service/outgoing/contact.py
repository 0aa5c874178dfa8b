"""Calls the broker, and records when Redis answered, since when it does not, and with which errors.

Knows no Redis: the broker retries for a short time what is safe to retry, and then raises an error
of `UNAVAILABLE`; what to do about it is up to each thread.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import TypeVar

import structlog

from quire.errors import BrokerUnavailable, DurabilityUnavailable, ProtocolError, QueueFull
from service.observe.metrics import Metrics
from service.observe.vitals import Vitals

#: What a call to the broker raises when Redis is away, full, or cannot write to disk; may pass.
UNAVAILABLE = (BrokerUnavailable, QueueFull, DurabilityUnavailable)
#: Pauses between two tries of a thread that cannot go on without Redis: the first, and the longest.
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
#: While an operation goes on failing, how often the log says so again.
REMINDER_SECONDS = 30.0

#: Operations that every worker calls several times per lease. While they are answered, so are the
#: renewals of other workers; any other operation may fail alone, and for long.
PULSE = frozenset({"heartbeat", "beat", "promote", "reap"})
#: Kinds of errors that mean that Redis is away, whatever was asked. Such an outage may fall between
#: two calls of the pulse, and Redis may come back from it with older leases than it had granted.
AWAY = frozenset({"connection", "timeout", "read_only"})

#: How Redis refuses every write while it cannot write its own files.
NOT_WRITTEN = "MISCONF"
#: The kind of an error by what the class of its cause is called.
_KINDS = {
    "timeout": ("Timeout",),
    "access": ("Authentication", "Authorization", "Permission"),
    "read_only": ("ReadOnly", "MasterDown"),
    "connection": ("Connection", "Loading", "MasterNotFound"),
}

_Result = TypeVar("_Result")
_log = structlog.get_logger("service.outgoing.contact")


class Contact:
    """The worker's books about Redis; shared by all threads.

    Contact is broken while a PULSE operation fails, when another operation begins to find Redis
    away, when Redis has lost something, and by more than `silence_seconds` without an answer: then
    this process stood still, and what it knows of the other workers is out of date. Other refusals,
    and other operations that go on failing while the pulse is answered, concern this worker alone.
    They go on failing, though some succeed in between, if Redis is found away again within
    `silence_seconds`: else nobody would count as dead where connections are cut off now and then.
    """

    def __init__(
        self,
        vitals: Vitals,
        metrics: Metrics,
        *,
        silence_seconds: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._vitals = vitals
        self._metrics = metrics
        self._silence_seconds = silence_seconds
        self._clock = clock
        self._last_answer = self._unbroken_since = clock()
        self._outages: dict[str, _Outage] = {}
        #: When the log last said that an operation fails.
        self._said: dict[str, float] = {}
        #: When any of them last found Redis away.
        self._last_away = -inf

    def call(self, operation: str, function: Callable[[], _Result]) -> _Result:
        """What `function` returns. `operation` is one of the register's OPERATIONS.

        Raises:
            UNAVAILABLE: Redis cannot serve now; counted and logged already.
            ProtocolError: Redis can never do what was asked; counted.
        """
        try:
            result = function()
        except UNAVAILABLE as error:
            kind = kind_of(error)
            self._metrics.redis_errors[operation, kind].inc()
            self._note_outage(operation, kind=kind, error=str(error))
            raise
        except ProtocolError:
            self._metrics.redis_errors[operation, "protocol"].inc()
            raise
        now = self._clock()
        if now - self._last_answer > self._silence_seconds:
            self._unbroken_since = now
        self._last_answer = now
        self._vitals.heard_from_redis()
        outage = self._outages.pop(operation, None)
        if outage and outage.is_said:
            away = round(now - outage.since, 1)
            _log.info("redis is back", operation=operation, away_seconds=away, calls=outage.calls)
        return result

    @property
    def unbroken_seconds(self) -> float:
        """How long contact is unbroken: whoever is alive could renew its leases meanwhile."""
        return self._clock() - self._unbroken_since

    def note_lapse(self) -> None:
        """Redis has lost what it had confirmed, and so perhaps the last renewals of leases.

        It was away for it, though so shortly that no call need have failed.
        """
        self._unbroken_since = self._clock()
        _log.warning("redis came back with older data")

    def _note_outage(self, operation: str, *, kind: str, error: str) -> None:
        """Log that an operation fails when it begins to, and from time to time while it does.

        One that fails and succeeds by turns, for instance while the memory of Redis is almost full,
        counts as one that goes on failing: otherwise each of its failures would log two lines.
        """
        now = self._clock()
        outage = self._outages.setdefault(operation, _Outage(since=now))
        was_away, outage.is_away = outage.is_away, kind in AWAY
        if outage.is_away:
            was_away = was_away or now - self._last_away <= self._silence_seconds
            self._last_away = now
        if operation in PULSE or (outage.is_away and not was_away):
            self._unbroken_since = now
        outage.calls += 1
        if now - self._said.get(operation, -inf) >= REMINDER_SECONDS:
            self._said[operation], outage.is_said = now, True
            _log.warning(
                "redis unavailable",
                operation=operation,
                calls=outage.calls,
                kind=kind,
                error=error,
            )


@dataclass(slots=True)
class _Outage:
    """An operation that fails: since when, in how many calls, and whether that was logged."""

    since: float
    calls: int = 0
    is_said: bool = False
    #: The last of these calls failed with an error of AWAY.
    is_away: bool = False


def kind_of(error: BaseException) -> str:
    """The error as one of the register's ERROR_KINDS, judged by what caused it."""
    if isinstance(error, QueueFull):
        return "memory"
    if isinstance(error, DurabilityUnavailable) or NOT_WRITTEN in str(error.__cause__):
        return "disk"
    # By name: this module does not import redis, and so does not know its exception classes.
    cause = type(error.__cause__).__name__
    for kind, names in _KINDS.items():
        if any(name in cause for name in names):
            return kind
    return "other"


def pauses() -> Iterator[float]:
    """Growing pauses for a thread that waits for Redis to come back."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
