"""Takes requests in: read, claim, answer for the claim, and hand the engine a Request.

Whatever is wrong with a request becomes its typed terminal record, naming the field, and the next
one is looked at: no input ends the worker.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

import structlog

from engine.request import FinishReason, Priority
from quire.broker import Broker
from quire.errors import InvalidRequest, ProtocolError, QuireError, UnsupportedVersion
from quire.protocol import GenerationRequest
from quire.transitions import Claim, Claimed, IngressEntry, NotClaimed, NotClaimedReason
from service.completions import Origin, not_resumable, own_failure, rejection, short_error
from service.config import Settings
from service.contact import LONGEST_PAUSE_SECONDS, UNAVAILABLE, Contact
from service.conversion import engine_request
from service.loop import EngineLoop
from service.metrics import Metrics
from service.model import ServedModel
from service.origins import decoded, is_resumable, key_of, origin_of, seconds_since
from service.outbox import Delivery, Outbox
from service.vitals import Vitals

#: How often a full line in front of the engine is looked at again.
FULL_SECONDS = 0.02
#: Pause after looking for an urgent request brought another one.
BETTER_PAUSE_SECONDS = 0.2
#: Claims beyond those that the engine works on: ended, and not committed yet. While commits fail
#: and claims do not, as where a disk has to answer for an end, all of the queue would end up here.
MAX_ENDED_CLAIMS = 1024
#: In a burst, how long one read may wait while the engine still has work.
BURST_BLOCK_SECONDS = 0.02

#: An entry of the stream and what its claim has brought.
Taken = tuple[IngressEntry, Claimed]
#: A claim that is answered for: what it has brought, to be published, and to be generated.
Opened = tuple[Claimed, Delivery, GenerationRequest]

_log = structlog.get_logger("service.intake")


class Intake:
    """Reads one shard of a queue for one engine. `run` is a thread's work.

    Several may fill the same engine, `num_intakes` in all: each takes its part of the room there
    is, so that together they claim no more than one would.
    """

    def __init__(
        self,
        broker: Broker,
        outbox: Outbox,
        *,
        shard: int = 0,
        num_intakes: int = 1,
        loop: EngineLoop,
        served: ServedModel,
        settings: Settings,
        vitals: Vitals,
        contact: Contact,
        metrics: Metrics,
        on_queue_empty: Callable[[], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._broker = broker
        self._outbox = outbox
        self._shard = shard
        self._thread = f"intake-{shard}"
        self._num_intakes = num_intakes
        self._loop = loop
        self._served = served
        self._settings = settings
        self._worker = settings.worker
        self._vitals = vitals
        self._contact = contact
        self._metrics = metrics
        self._on_queue_empty = on_queue_empty
        self._clock = clock
        self._stopping = threading.Event()
        self._next_recovery = self._next_better = clock()
        #: What was claimed last may have killed workers; where one is, others of its batch are.
        self._is_careful = False

    def run(self) -> None:
        """Take requests in until stopped; in a burst, until there are none and all are done."""
        while not self._stopping.is_set():
            self._vitals.beat(self._thread)
            try:
                self._round()
            except QuireError as error:
                # What a lost reply delivered is found by the next recovery; what it claimed is
                # renewed by nobody and comes back when its lease ends.
                if not isinstance(error, UNAVAILABLE):
                    _log.exception("queue cannot be read")
                self._stopping.wait(LONGEST_PAUSE_SECONDS)

    def stop(self) -> None:
        """Return from `run` after at most one read. What that read still claims is given back."""
        self._stopping.set()

    def room(self, least: Priority = Priority.LOW) -> int:
        """How many requests of class `least` may be claimed now; 0 or less for none.

        The rule: of each class and all better ones together, no more than one batch waits in front
        of the engine. That line empties with every step that has a slot and blocks to spare, so
        slots fill as fast as they free, and what cannot run here yet stays where any worker can
        claim it. What runs is taken to be of the best classes: if it is not, it can be preempted.

        None beside one that may kill this worker, but for better classes: each that has published
        nothing would be charged with an attempt. And none while too many ends cannot be committed.
        """
        settings, outbox = self._settings, self._outbox
        most = settings.max_num_seqs + settings.claim_batch + MAX_ENDED_CLAIMS
        if outbox.has_trial(least) or outbox.num_claims >= most:
            return 0
        held = outbox.num_open(least)
        room = settings.claim_batch - max(0, held - self._loop.num_running)
        return min(-(-room // self._num_intakes), 1 if self._is_careful else room)

    def _round(self) -> None:
        if self._vitals.overdue:
            # It would take back what its own leases have just lost, and hold that too.
            self._stopping.wait(FULL_SECONDS)
            return
        room = self.room()
        if room > 0 and self._clock() >= self._next_recovery:
            # What nobody claimed may be what nobody can: each alone, so that it costs no other.
            for entry in self._vitals.each(self._thread, self._recover(room)):
                self._take_in([entry])
            room = self.room()
        was_done = self._outbox.is_empty
        if room > 0:
            entries = self._read(room, block_seconds=self._block_seconds(was_done=was_done))
        else:
            entries = self._read_better()
        self._take_in(entries)
        if self._settings.burst and was_done and not entries:
            self._end_burst()

    def _read_better(self) -> list[IngressEntry]:
        """With the line full, still read requests of a better class than what makes it full.

        Without this a line of bulk requests would keep an urgent one from ever reaching the engine,
        which could preempt for it.
        """
        entries: list[IngressEntry] = []
        if self._clock() >= self._next_better:
            depth = self._contact.call("read", self._broker.queue_depth)
            best = max((priority for priority, count in depth.items() if count), default=None)
            if best is not None and (room := min(self.room(Priority(best)), depth[best])) > 0:
                entries = self._read(room, block_seconds=0.0)
                if any(entry.priority < best for entry in entries):
                    # The urgent one was delivered to somebody before; bulk must not slip in for it.
                    self._next_better = self._clock() + BETTER_PAUSE_SECONDS
        if not entries:
            self._stopping.wait(FULL_SECONDS)
        return entries

    def _block_seconds(self, *, was_done: bool) -> float:
        block = self._settings.block_seconds
        if not self._settings.burst:
            return block
        return 0.0 if was_done else min(block, BURST_BLOCK_SECONDS)

    def _end_burst(self) -> None:
        """The end, but for what a dead worker has left: the keeper queues it when it may.

        A burst is shorter than the time for which it has to listen to the others before. Were that
        left to the next one, it would be left for ever.
        """
        if self._contact.call("read", self._broker.num_expired_leases) > 0:
            self._stopping.wait(FULL_SECONDS)
            return
        self._say_what_is_left()
        self._stopping.set()
        self._on_queue_empty()

    def _say_what_is_left(self) -> None:
        """Warn of requests that a burst leaves behind because nobody may claim them now."""

        def look() -> tuple[int, int, str | None]:
            broker = self._broker
            waiting = sum(broker.queue_depth().values())
            return waiting, broker.num_scheduled(), broker.pause_reason()

        waiting, scheduled, reason = self._contact.call("read", look)
        if waiting or scheduled:
            _log.warning(
                "burst leaves requests",
                shard=self._shard,
                waiting=waiting,
                scheduled=scheduled,
                paused=reason is not None,
            )

    def _read(self, count: int, *, block_seconds: float) -> list[IngressEntry]:
        read = partial(
            self._broker.read_ingress, self._worker, count=count, block_seconds=block_seconds
        )
        return self._contact.call("read", read)

    def _recover(self, room: int) -> list[IngressEntry]:
        """Deliveries that nobody claimed: our own from a former life, and others' left alone.

        No more than there is room for. The rest is pending for us, and found by the next look.
        """
        # Also after a flush or a failover; autoscalers watch the group before there is any entry.
        self._contact.call("recover", self._broker.ensure_groups)
        lease = self._settings.lease_seconds
        recover = partial(
            self._broker.recover_entries, self._worker, min_idle_seconds=lease, count=room
        )
        entries = self._contact.call("recover", recover)
        if len(entries) < room:
            self._next_recovery = self._clock() + lease
        self._metrics.redelivered.inc(min(len(entries), room))
        return entries[:room]

    def _take_in(self, entries: list[IngressEntry]) -> None:
        if not entries:
            return
        now_ms = self._contact.call("claim", self._broker.now_ms)
        claimed = self._claim(entries)
        if not claimed:
            return
        if self._stopping.is_set():
            # The read was under way when we were told to stop.
            self._give_back(claimed)
            return
        with self._outbox.trials:
            now, later = self._in_turn(claimed)
            # All before the first is tokenized: that may outlast a lease, and what is open is
            # renewed.
            opened = self._opened(now, now_ms=now_ms)
        # Before the engine has what may kill it: what is given back is charged with nothing.
        self._give_back(later)
        for answer, delivery, request in self._vitals.each(self._thread, opened):
            self._admit(answer, delivery, request, now_ms=now_ms)

    def _in_turn(self, claimed: Sequence[Taken]) -> tuple[Sequence[Taken], Sequence[Taken]]:
        """Those to take in now, and those to give back, for another worker or our next read.

        A process that is killed in a step does not say of whose fault. Were all that it had begun
        begun together again, the innocent would die as often as the one that kills, and be given
        up with it. So each of them begins alone: until it has published something, or has ended.
        """
        count = next((n for n, (_, it) in enumerate(claimed) if it.attempts > 1), len(claimed))
        self._is_careful = count < len(claimed)
        if count == 0 and not self._outbox.has_trial(Priority.LOW):
            count = 1
        elif count == 0:
            self._next_better = self._clock() + BETTER_PAUSE_SECONDS
        return claimed[:count], claimed[count:]

    def _give_back(self, claimed: Sequence[Taken]) -> None:
        """Release what is claimed and not opened; where that fails, leases hand it over."""
        if not claimed:
            return
        claims = [answer.claim for _, answer in claimed]
        try:
            self._contact.call("release", partial(self._broker.release, claims))
        except QuireError as error:
            ids = [claim.request_id for claim in claims]
            _log.error("not given back", request_ids=ids, error=str(error))

    def _opened(self, claimed: Sequence[Taken], *, now_ms: int) -> list[Opened]:
        # One line for all: the engine begins with the first while the next are admitted.
        _log.debug("requests claimed", request_ids=[entry.request_id for entry, _ in claimed])
        opened = []
        for entry, answer in self._vitals.each(self._thread, claimed):
            try:
                found = self._open(entry, answer, now_ms=now_ms)
            except QuireError as error:
                # This one's lease hands it over. Its neighbours are claimed, too, and go on.
                _log.error("not taken in", request_id=entry.request_id, error=str(error))
                continue
            if found:
                opened.append((answer, *found))
        return opened

    def _claim(self, entries: list[IngressEntry]) -> list[Taken]:
        """Those of the entries that are ours now."""
        claim = partial(self._broker.claim, entries, fingerprint=self._served.fingerprint)
        try:
            answers = self._contact.call("claim", claim)
        except ProtocolError as error:
            # The server answers what our scripts do not. The entries stay pending, and what was
            # claimed comes back by its lease.
            ids = [entry.request_id for entry in entries]
            _log.error("not claimed", request_ids=ids, error=str(error))
            return []
        claimed = []
        for entry, answer in zip(entries, answers, strict=True):
            if isinstance(answer, NotClaimed):
                _log.debug("not claimed", request_id=entry.request_id, reason=str(answer.reason))
                if answer.ended and answer.reason is NotClaimedReason.EXPIRED:
                    self._metrics.finished["deadline"].inc()
            else:
                claimed.append((entry, answer))
        return claimed

    def _open(
        self, entry: IngressEntry, claimed: Claimed, *, now_ms: int
    ) -> tuple[Delivery, GenerationRequest] | None:
        """Answer for a claimed request from now on; None when that was its end already."""
        label = entry.priority.name.lower()
        self._metrics.received[label].inc()
        self._metrics.stream_wait_seconds[label].observe(seconds_since(entry.enqueued_ms, now_ms))
        try:
            request, invalid = decoded(claimed.request_bytes)
        except ProtocolError as error:
            unknown = isinstance(error, UnsupportedVersion)
            reason = "unsupported_version" if unknown else "undecodable"
            self._bury(claimed.claim, error, reason=reason)
            return None
        origin = origin_of(
            claimed,
            request,
            priority=Priority(entry.priority),
            now_ms=now_ms,
            received=self._clock(),
            served=self._served,
            model=self._settings.model_name,
        )
        tell = self._served.tokenizer.with_texts
        delivery = Delivery(key_of(claimed.claim), claimed.claim, origin, self._shard, tell=tell)
        try:
            delivery.recall(claimed.published)
        except ProtocolError as error:
            self._bury(claimed.claim, error, reason="broken_log")
            return None
        self._outbox.open(delivery)
        if request is None:
            assert invalid is not None
            self._outbox.end(delivery.key, partial(rejection, error=invalid))
            return None
        return delivery, request

    def _admit(
        self, claimed: Claimed, delivery: Delivery, request: GenerationRequest, *, now_ms: int
    ) -> None:
        """Hand one open request to the engine, or end it with a typed record."""
        try:
            converted = engine_request(
                request, delivery, served=self._served, settings=self._settings, now_ms=now_ms
            )
        except InvalidRequest as error:
            self._outbox.end(delivery.key, partial(rejection, error=error))
        except Exception as error:  # noqa: BLE001 - ours or a library's: it costs one request.
            _log.exception("intake failed", **delivery.origin.names)
            self._outbox.end(delivery.key, partial(own_failure, error=error))
        else:
            if not is_resumable(delivery.origin):
                self._refuse_to_resume(delivery)
                return
            self._note_resume(delivery.origin)
            delivery.request = converted
            self._loop.add(converted)
            # Lost since it was opened: the engine was told so before it had it, and would run it
            # to its end for nobody.
            if claimed.cancel_requested or not self._outbox.holds(delivery.key):
                self._loop.abort(delivery.key, FinishReason.CANCELLED)

    def _refuse_to_resume(self, delivery: Delivery) -> None:
        origin = delivery.origin
        fingerprints = {"before": origin.other_fingerprint, "here": origin.fingerprint}
        _log.warning("not resumable", **origin.names, **fingerprints)
        self._outbox.end(delivery.key, not_resumable)

    def _note_resume(self, origin: Origin) -> None:
        """Say that another claim had the request before, and what it left."""
        if origin.epoch == 1:
            return
        if origin.num_resumed_tokens > 0:
            self._metrics.resumed["changed" if origin.fingerprint_changed else "same"].inc()
        _log.info(
            "request resumed",
            **origin.names,
            tokens=origin.num_resumed_tokens,
            attempts=origin.attempts,
            other_fingerprint=origin.other_fingerprint,
        )

    def _bury(self, claim: Claim, error: ProtocolError, *, reason: str) -> None:
        """End a request that cannot be read, or not be gone on with; its bytes are kept."""
        info = short_error(reason, str(error))
        bury = partial(self._broker.dead_letter, claim, f"{reason}: {info.message}", error=info)
        self._contact.call("bury", bury)
        self._metrics.dead_lettered[reason].inc()
        self._metrics.finished["rejected"].inc()
        names = {"request_id": claim.request_id, "epoch": claim.epoch}
        _log.warning("dead letter", **names, reason=reason, error=info.message)
