"""Keeps this worker's claims alive, and looks after the queue: what died, and what is due.

The heartbeat has a thread of its own, so that nothing slow can delay it, and yet stops when the
engine makes no progress: a worker that only looks alive must lose its claims.
"""

import random
import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Protocol

import structlog

from quire.broker import Broker
from service.contact import UNAVAILABLE, Contact
from service.metrics import Metrics
from service.outbox import Outbox
from service.vitals import Vitals, WorkerState

#: Renewals per lease: two may be lost before the third is due.
BEATS_PER_LEASE = 3
#: The longest a scheduled request may be late for its queue.
PROMOTE_SECONDS = 1.0

_log = structlog.get_logger("service.leases")


class ClaimHolder(Protocol):
    """What becomes of a claim the heartbeat finds lost or cancelled; the publisher knows."""

    def lose(self, key: str, *, unless_ended: bool) -> None: ...

    def cancel(self, key: str) -> None: ...


class Heartbeat:
    """Renews all leases of this worker every third of a lease. `run` is a thread's work."""

    def __init__(
        self,
        broker: Broker,
        outbox: Outbox,
        *,
        holder: ClaimHolder,
        vitals: Vitals,
        contact: Contact,
        lease_seconds: float,
    ) -> None:
        self._broker = broker
        self._outbox = outbox
        self._holder = holder
        self._vitals = vitals
        self._contact = contact
        self._period_seconds = lease_seconds / BEATS_PER_LEASE
        self._stopping = threading.Event()

    def run(self) -> None:
        """Beat until stopped."""
        while not self._stopping.wait(self._period_seconds):
            self.beat()

    def stop(self) -> None:
        """Return from `run`; leases run out by themselves then."""
        self._stopping.set()

    def beat(self) -> None:
        """Renew every lease once, unless the engine is stalled; act on what Redis says."""
        if self._vitals.is_stalled:
            _log.error(
                "engine stalled; leases are left to expire",
                seconds_since_progress=round(self._vitals.seconds_since_progress, 1),
            )
            return
        held = self._outbox.claims()
        if not held:
            return
        claims = [claim for _, claim in held]
        try:
            replies = self._contact.call("heartbeat", lambda: self._broker.heartbeat(claims))
        except UNAVAILABLE:
            return
        for (key, _), reply in zip(held, replies, strict=True):
            if not reply.alive:
                self._holder.lose(key, unless_ended=True)
            elif reply.cancel_requested:
                self._holder.cancel(key)


class Housekeeper:
    """Reaps expired leases, queues what is due, signs the registry. `run` is a thread's work.

    Every worker does it, at jittered times and without a leader: the transitions are idempotent.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        worker: str,
        load: Callable[[], Mapping[str, float]],
        vitals: Vitals,
        contact: Contact,
        metrics: Metrics,
        lease_seconds: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock = clock
        self._broker = broker
        self._worker = worker
        self._load = load
        self._vitals = vitals
        self._contact = contact
        self._metrics = metrics
        self._lease_seconds = lease_seconds
        self._stopping = threading.Event()
        # Seeded by the system: workers started together must not stay together.
        self._random = random.SystemRandom()

    def run(self) -> None:
        """Keep house until stopped, then sign off."""
        next_tidy = self._clock()
        while True:
            if self._clock() >= next_tidy:
                is_heard = self.tidy()
                next_tidy = self._clock() + self._lease_seconds * self._random.uniform(0.25, 0.75)
            else:
                is_heard = self.promote()
            pause = min(PROMOTE_SECONDS, self._lease_seconds / 4) * self._random.uniform(0.5, 1.0)
            if self._stopping.wait(pause):
                if is_heard:
                    has_failed = self._vitals.state is WorkerState.FAILED
                    self._sign("failed" if has_failed else "stopped")
                return

    def stop(self) -> None:
        """Return from `run`."""
        self._stopping.set()

    def tidy(self) -> bool:
        """Sign the registry, then put what dead workers held back into the queue.

        False when Redis did not answer.
        """
        if not self._sign(self._vitals.state):
            return False
        try:
            reaped = self._contact.call("reap", self._broker.reap)
        except UNAVAILABLE:
            return False
        if reaped:
            self._metrics.reaped.inc(len(reaped))
            _log.info("leases reaped", request_ids=[item.request_id for item in reaped])
        return True

    def promote(self) -> bool:
        """Queue the scheduled requests that are due. False when Redis did not answer."""
        try:
            promoted = self._contact.call("promote", self._broker.promote)
        except UNAVAILABLE:
            return False
        if promoted:
            _log.debug("requests promoted", request_ids=[item.request_id for item in promoted])
        return True

    def _sign(self, state: str) -> bool:
        load = dict(self._load())
        try:
            self._contact.call("beat", lambda: self._broker.beat_worker(self._worker, state, load))
        except UNAVAILABLE:
            return False
        return True
