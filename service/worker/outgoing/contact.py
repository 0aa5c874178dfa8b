"""Calls the broker, and records when Redis answers, outages, and their errors.

Does not use Redis itself. The broker retries idempotent calls for a short time, and then raises an
error of `UNAVAILABLE`; each thread decides what to do then.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import TypeVar

import structlog

from quire.errors import UNAVAILABLE, DurabilityUnavailable, ProtocolError, QueueFull
from service.worker.observe.metrics import Metrics
from service.worker.observe.vitals import Vitals

#: Pauses between the tries of a thread that cannot continue without Redis: the first, the longest.
FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
#: The interval between two log lines about an operation that keeps failing.
REMINDER_SECONDS = 30.0

#: Operations that every worker calls several times per lease. If Redis answers them, other workers
#: can renew their leases, too. Any other operation may fail alone, and for long.
PULSE = frozenset({"heartbeat", "beat", "promote", "reap"})
#: Kinds of errors that mean that Redis is unreachable for all operations. Such an outage may happen
#: between two calls of PULSE. After it, Redis may have lost the last renewals of leases.
AWAY = frozenset({"connection", "timeout", "read_only"})

#: The error code with which Redis refuses every write while it cannot write its own files.
NOT_WRITTEN = "MISCONF"
#: The kind of an error -> parts of the class names of its causes.
_KINDS = {
    "timeout": ("Timeout",),
    "access": ("Authentication", "Authorization", "Permission"),
    "read_only": ("ReadOnly", "MasterDown"),
    "connection": ("Connection", "Loading", "MasterNotFound", "ClusterDown"),
}

_Result = TypeVar("_Result")
_log = structlog.get_logger("service.worker.outgoing.contact")


class Contact:
    """Records the worker's contact with Redis; shared by all threads.

    Contact is broken in four cases: while a PULSE operation fails; when another operation begins to
    fail with a kind of AWAY; when Redis has lost data; and after more than `silence_seconds`
    without an answer. In the last case this process was paused, and its knowledge of other workers
    is out of date.

    All other failures concern this worker alone and do not break the contact: other kinds of
    errors, and operations that keep failing while PULSE is answered. An operation also counts as
    one that keeps failing if the last failure of any operation with a kind of AWAY is at most
    `silence_seconds` ago, even with successes in between. Otherwise, if connections were cut off
    now and then, contact would never stay unbroken for long enough to reap the leases of dead
    workers.
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
        #: Operation -> the time of the last log line about its failure.
        self._logged: dict[str, float] = {}
        #: The time of the last failure of any operation with a kind of AWAY.
        self._last_away = -inf

    def call(self, operation: str, function: Callable[[], _Result]) -> _Result:
        """Calls `function` and returns its result. `operation` is one of the register's OPERATIONS.

        Raises:
            UNAVAILABLE: Redis cannot serve now; already counted and logged.
            ProtocolError: Redis can never execute this call; already counted.
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
        if outage and outage.is_logged:
            away = round(now - outage.since, 1)
            _log.info("redis is back", operation=operation, away_seconds=away, calls=outage.calls)
        return result

    @property
    def unbroken_seconds(self) -> float:
        """How long contact has been unbroken; all live workers could renew leases in this time."""
        return self._clock() - self._unbroken_since

    def note_lapse(self) -> None:
        """Note that Redis has lost confirmed writes, perhaps also the last renewals of leases.

        It must have restarted, but perhaps so fast that no call has failed.
        """
        self._unbroken_since = self._clock()
        _log.warning("redis came back with older data")

    def _note_outage(self, operation: str, *, kind: str, error: str) -> None:
        """Log when an operation begins to fail, and every REMINDER_SECONDS while it keeps failing.

        An operation that alternately fails and succeeds, for instance while the memory of Redis is
        almost full, counts as one that keeps failing: otherwise each failure would log two lines.
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
        if now - self._logged.get(operation, -inf) >= REMINDER_SECONDS:
            self._logged[operation], outage.is_logged = now, True
            _log.warning(
                "redis unavailable",
                operation=operation,
                calls=outage.calls,
                kind=kind,
                error=error,
            )


@dataclass(slots=True)
class _Outage:
    """A failing operation: since when, the number of failed calls, and whether it was logged."""

    since: float
    calls: int = 0
    is_logged: bool = False
    #: The last of these calls failed with a kind of AWAY.
    is_away: bool = False


def kind_of(error: BaseException) -> str:
    """The register's ERROR_KIND of an error, derived from its cause."""
    if isinstance(error, QueueFull):
        return "memory"
    if isinstance(error, DurabilityUnavailable) or NOT_WRITTEN in str(error.__cause__):
        return "disk"
    # By the name of the class, because this module does not import redis.
    cause = type(error.__cause__).__name__
    for kind, names in _KINDS.items():
        if any(name in cause for name in names):
            return kind
    return "other"


def pauses() -> Iterator[float]:
    """Yields growing pauses, in seconds, for a thread that waits for Redis to come back."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
