"""Renews leases and pictures, reaps expired leases, and queues scheduled requests that are due.

The heartbeat has its own thread, so that no slow work can delay it. But it renews nothing while the
engine makes no progress or another thread hangs, so that such a worker loses its claims.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from math import inf
from time import monotonic
from typing import Protocol, TypeVar

import structlog

from quire.errors import UNAVAILABLE, ProtocolError
from quire.queue.lease.lease import HeartbeatReply
from quire.queue.lease.moving import Expired, Promoted, Reaped
from quire.queue.repair.restore import Restored
from quire.queue.request.claims import Claim
from quire.queue.roles import WorkerSide
from quire.wire.output import State
from service.worker.observe.metrics import Metrics
from service.worker.observe.vitals import Vitals, WorkerState
from service.worker.outgoing.contact import Contact
from service.worker.outgoing.outbox import Outbox
from service.worker.settings.bounds import BEATS_PER_LEASE

#: The longest pause between two checks of the keeper for due requests.
PROMOTE_SECONDS = 1.0
#: The longest time that the keeper repeats one transition while there are more requests to move.
BUSY_SECONDS = 1.0
#: The most request ids in one log line.
MAX_LOGGED_IDS = 20

_Moved = TypeVar("_Moved", Reaped, Promoted, Expired, Restored)
_log = structlog.get_logger("service.worker.outgoing.leases")


class ClaimHolder(Protocol):
    """Handles claims that the heartbeat finds lost or cancelled; implemented by the Publisher."""

    def lose(self, key: str, *, unless_ended: bool) -> None: ...

    def cancel(self, key: str) -> None: ...


class Heartbeat:
    """Renews all leases of this worker every third of a lease. `run` is the body of a thread."""

    def __init__(
        self,
        brokers: Mapping[int, WorkerSide],
        outbox: Outbox,
        *,
        holder: ClaimHolder,
        vitals: Vitals,
        contact: Contact,
        lease_seconds: float,
    ) -> None:
        self._brokers = brokers
        self._outbox = outbox
        self._holder = holder
        self._vitals = vitals
        self._contact = contact
        self._period_seconds = lease_seconds / BEATS_PER_LEASE
        self._stopping = threading.Event()
        #: The nodes of a cluster that did not answer the last time; "" is a single server.
        self._silent: set[str] = set()

    def run(self) -> None:
        """Beat until stopped."""
        pause = self._period_seconds
        self._vitals.beat("heartbeat", rest_seconds=pause)
        while not self._stopping.wait(pause):
            # Without an answer, retry sooner: after an outage, our leases must be renewed before
            # another worker reaps them.
            pause = self._period_seconds if self.beat() else self._period_seconds / BEATS_PER_LEASE
            self._vitals.beat("heartbeat", rest_seconds=pause)

    def stop(self) -> None:
        """Make `run` return; the leases then expire."""
        self._stopping.set()

    def beat(self) -> bool:
        """Renew every lease once, unless a thread hangs; handle lost and cancelled claims.

        False when Redis did not answer.
        """
        self._vitals.beat("heartbeat")
        if overdue := self._vitals.overdue:
            _log.error(
                "leases not renewed: a thread hangs",
                overdue=[silence.thread for silence in overdue],
                seconds_since_progress=round(self._vitals.seconds_since_progress, 1),
            )
            return True
        silent: set[str] = set()
        # First the shards whose node has answered, so that another one does not delay them.
        places = sorted(self._brokers, key=lambda place: self._brokers[place].node in self._silent)
        for place in self._vitals.each("heartbeat", places):
            broker = self._brokers[place]
            if (node := broker.node) in silent:
                continue
            try:
                self._beat_shard(broker, self._outbox.claims(place=place))
            except UNAVAILABLE:
                silent.add(node)
        self._silent = silent
        return not silent

    def _beat_shard(self, broker: WorkerSide, held: Sequence[tuple[str, Claim]]) -> None:
        replies = self._renew(broker, [claim for _, claim in held])
        for (key, _), reply in zip(held, replies, strict=True):
            if not reply.alive:
                self._holder.lose(key, unless_ended=True)
            elif reply.cancel_requested:
                self._holder.cancel(key)

    def _renew(self, broker: WorkerSide, claims: Sequence[Claim]) -> list[HeartbeatReply]:
        """Renew leases; one reply per claim. A claim that cannot be renewed counts as lost."""
        if not claims:
            return []
        try:
            return self._contact.call("heartbeat", lambda: broker.heartbeat(claims))
        except ProtocolError as error:
            if len(claims) == 1:
                request_id = claims[0].request_id
                _log.error("lease cannot be renewed", request_id=request_id, error=str(error))
                return [HeartbeatReply(alive=False, cancel_requested=False)]
        return [reply for claim in claims for reply in self._renew(broker, [claim])]


#: How long the registry shows `twins` after another worker was seen with our name.
TWIN_SECONDS = 60.0


class Housekeeper:
    """Reaps expired leases, queues due requests, restores lost ones, and registers the worker.

    Every worker does this, at random intervals and without a leader: the transitions are
    idempotent. `run` is the body of a thread.

    Args:
        load: returns numbers for the registry of a place; see `Broker.beat_worker`.
        serves: returns the name of the model of a place and the fingerprints of its adapters, for
            the registry.
        policy: returns the policy of the worker at a place, for the registry.
        pictures: returns the digests of the pictures of the requests that run at a place.
        on_drain: called, perhaps repeatedly, when an operator has asked this worker to drain.
    """

    def __init__(
        self,
        brokers: Mapping[int, WorkerSide],
        *,
        worker: str,
        load: Callable[[int], Mapping[str, float]],
        on_drain: Callable[[], None],
        vitals: Vitals,
        contact: Contact,
        metrics: Metrics,
        lease_seconds: float,
        serves: Callable[[int], tuple[str, Mapping[str, str]]] = lambda _: ("", {}),
        policy: Callable[[int], str] = lambda _: "",
        pictures: Callable[[int], Sequence[str]] = lambda _: (),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock = clock
        self._brokers = brokers
        self._place_of = {broker: place for place, broker in brokers.items()}
        self._worker = worker
        self._serves = serves
        self._policy = policy
        self._pictures = pictures
        self._load = load
        self._on_drain = on_drain
        self._vitals = vitals
        self._contact = contact
        self._metrics = metrics
        self._lease_seconds = lease_seconds
        self._stopping = threading.Event()
        #: The state in the registry.
        self._registered = ""
        #: WorkerSide -> the time of this worker's last registration, on the broker's clock.
        self._seen_ms: dict[WorkerSide, int] = {}
        #: Brokers for which that time is certain, because no reply was lost since.
        self._is_certain: set[WorkerSide] = set()
        #: When another worker was last seen with our name.
        self._twin_seen = -inf
        # Seeded by the system: workers that started together must not stay in step.
        self._random = random.SystemRandom()

    def run(self) -> None:
        """Do the housekeeping until stopped, then register the worker as stopped or failed."""
        next_tidy = self._clock()
        while True:
            self._vitals.beat("keeper")
            if self._clock() >= next_tidy:
                is_answered = self.tidy()
                next_tidy = self._clock() + self._lease_seconds * self._random.uniform(0.25, 0.75)
            else:
                is_answered = self._register_new_state() and self.promote()
            pause = min(PROMOTE_SECONDS, self._lease_seconds / 4) * self._random.uniform(0.5, 1.0)
            if self._stopping.wait(pause):
                if is_answered:
                    has_failed = self._vitals.state is WorkerState.FAILED
                    self._register("failed" if has_failed else "stopped")
                return

    def stop(self) -> None:
        """Make `run` register the end of the worker and return."""
        self._stopping.set()

    def tidy(self) -> bool:
        """Register the worker, keep pictures, requeue requests of dead workers, restore lost ones.

        After an outage all leases may have expired although their owners are alive; so the owners
        get the time of one lease to renew them first. False when Redis did not answer.
        """
        if not self._register(self._vitals.state):
            return False
        # Ignored if it fails: a picture lives far longer than the time until the next try.
        self._in_every_shard("hold", self._keep_pictures)
        if self._contact.unbroken_seconds < self._lease_seconds:
            return True
        is_answered = self._in_every_shard("reap", self._reap)
        if is_answered:
            # A failure of RESTORE is ignored: the worker's Redis user may not be allowed to run it.
            self._in_every_shard("restore", self._restore)
        return is_answered

    def promote(self) -> bool:
        """Queue due requests, and end those that waited too long. False without an answer."""
        return self._in_every_shard("promote", self._promote)

    def _keep_pictures(self, broker: WorkerSide) -> None:
        if digests := self._pictures(self._place_of[broker]):
            broker.keep_pictures(digests)

    def _reap(self, broker: WorkerSide) -> None:
        for reaped in self._parts(broker.reap):
            self._count_late(broker, reaped)
            self._of(broker).reaped.inc(len(reaped))
            _log.info("leases reaped", request_ids=[item.request_id for item in reaped])

    def _restore(self, broker: WorkerSide) -> None:
        # The first call examines a part of the requests, and only now and then. If it finds a loss,
        # there are usually more, so the next calls continue at once.
        calls = count()
        for restored in self._parts(lambda: broker.restore(is_at_once=next(calls) > 0)):
            for lost, number in Counter(item.lost for item in restored).items():
                self._of(broker).restored[lost].inc(number)
            _log.warning(
                "restored keys of requests that redis had lost",
                request_ids=[item.request_id for item in restored[:MAX_LOGGED_IDS]],
                requests=len(restored),
                lost=sorted({item.lost for item in restored}),
            )

    def _promote(self, broker: WorkerSide) -> None:
        for promoted in self._parts(partial(broker.promote, ends_late=False)):
            self._count_late(broker, promoted)
            _log.debug("requests promoted", request_ids=[item.request_id for item in promoted])
        for expired in self._parts(broker.expire):
            self._count_late(broker, expired)

    def _parts(self, move: Callable[[], Sequence[_Moved]]) -> Iterator[Sequence[_Moved]]:
        """Repeat a transition until it moves nothing more, for at most BUSY_SECONDS.

        Each call moves only a part, so that it does not block other clients of Redis for long. Many
        requests are due at once if they were scheduled for the same time, or if a worker with many
        claims died.
        """
        give_up = self._clock() + BUSY_SECONDS
        while part := move():
            yield part
            if self._clock() >= give_up or self._stopping.is_set():
                return

    def _of(self, broker: WorkerSide) -> Metrics:
        """The metrics of the model that a broker's queue has."""
        return self._metrics.of(self._place_of[broker])

    def _count_late(self, broker: WorkerSide, moved: Iterable[Reaped | Promoted | Expired]) -> None:
        """Count the requests that expired before any worker had claimed them."""
        late = sum(item.state is State.EXPIRED for item in moved)
        self._of(broker).finished["deadline"].inc(late)

    def _register_new_state(self) -> bool:
        """Register at once if the worker's state has changed. False when Redis did not answer."""
        state = self._vitals.state
        if state == self._registered:
            return True
        return self._register(state)

    def _warn_of_other_models(self, broker: WorkerSide) -> None:
        model, _ = self._serves(self._place_of[broker])
        others = [info for info in broker.workers() if info.is_alive and info.name != self._worker]
        for info in others:
            if info.model not in ("", model):
                _log.warning(
                    "another worker of this queue serves another model: a request that names no "
                    "model gets either, and one that names a model may be refused",
                    worker=info.name, model=info.model, shard=broker.keys.shard,
                )  # fmt: skip

    def _register(self, state: str) -> bool:
        """Write the worker's entry of the registry. False when Redis did not answer."""
        if state is WorkerState.READY and state != self._registered:
            self._in_every_shard("beat", self._warn_of_other_models)

        def beat(broker: WorkerSide) -> None:
            self._compare(broker.seen_ms(self._worker), broker)
            self._is_certain.discard(broker)
            place = self._place_of[broker]
            load = {**self._load(place), **({"twins": 1} if self._has_twin else {})}
            (model, adapters), policy = self._serves(place), self._policy(place)
            if broker.beat_worker(
                self._worker, state, load, model=model, adapters=adapters, policy=policy
            ):
                self._on_drain()
            self._seen_ms[broker] = broker.seen_ms(self._worker)
            self._is_certain.add(broker)

        is_answered = self._in_every_shard("beat", beat)
        if is_answered:
            self._registered = state
        return is_answered

    def _compare(self, seen_ms: int, broker: WorkerSide) -> None:
        """Compare the time in the registry with the time at which this worker last wrote it."""
        own_ms = self._seen_ms.get(broker, 0)
        if seen_ms < own_ms:
            # A server that restarts fast may fail no call at all. If it has lost its last seconds,
            # it has also lost the last renewals of leases.
            self._contact.note_lapse()
        elif seen_ms > own_ms and broker in self._is_certain:
            if not self._has_twin:
                _log.error(
                    "another worker has this name: the registry shows only one of the two, and "
                    "`quire drain` may end only one; give each worker its own name",
                    worker=self._worker,
                )
            self._twin_seen = self._clock()

    @property
    def _has_twin(self) -> bool:
        return self._clock() - self._twin_seen < TWIN_SECONDS

    def _in_every_shard(self, operation: str, act: Callable[[WorkerSide], None]) -> bool:
        """Call `act` for each shard. False when Redis did not answer.

        A ProtocolError is only logged: a broken key needs an operator, and it must not end all
        workers of the queue one after the other.
        """
        silent: set[str] = set()
        for broker in self._vitals.each("keeper", self._brokers.values()):
            if (node := broker.node) in silent:
                continue
            try:
                self._contact.call(operation, partial(act, broker))
            except UNAVAILABLE:
                # The shards at other nodes of a cluster must not wait for this one.
                silent.add(node)
            except ProtocolError as error:
                _log.error("queue cannot be tidied", operation=operation, error=str(error))
        return not silent
