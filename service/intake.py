"""Takes requests in: reads and claims them, opens a Delivery and hands the engine a Request.

A request with a mistake ends with a typed record that names the field; none ends the worker.
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

#: Pause before the next look while nothing may be claimed.
FULL_SECONDS = 0.02
#: Pause before looking for a more urgent request again, after a look that found none to take in.
BETTER_PAUSE_SECONDS = 0.2
#: Most claims that have ended and are not committed yet. Without a limit, a worker whose commits
#: fail and whose claims succeed, as when a durable queue's disk hangs, would claim the whole queue.
MAX_ENDED_CLAIMS = 1024
#: In a burst, how long one read may wait while the engine still has work.
BURST_BLOCK_SECONDS = 0.02

#: An entry of the ingress stream, and the reply to its claim.
Taken = tuple[IngressEntry, Claimed]
#: An open claim: the reply to it, what it has to publish, and the decoded request.
Opened = tuple[Claimed, Delivery, GenerationRequest]

_log = structlog.get_logger("service.intake")


class Intake:
    """Reads one shard of a queue for one engine. `run` is a thread's work.

    `num_intakes` of them feed the same engine: each takes its share of the room, rounded up, so
    that together they claim hardly more than one would.
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
        #: The last batch had one that may have killed workers; more may follow: one at a time.
        self._is_careful = False

    def run(self) -> None:
        """Take requests in until stopped; in a burst, until none are left and all have ended."""
        while not self._stopping.is_set():
            self._vitals.beat(self._thread)
            try:
                self._round()
            except QuireError as error:
                # Entries that a lost reply delivered are found by the next recovery. Claims that it
                # granted are renewed by nobody, and come back when their leases expire.
                if not isinstance(error, UNAVAILABLE):
                    _log.exception("queue cannot be read")
                self._stopping.wait(LONGEST_PAUSE_SECONDS)

    def stop(self) -> None:
        """Make `run` return after at most one read; what that read claims is given back."""
        self._stopping.set()

    def room(self, least: Priority = Priority.LOW) -> int:
        """How many requests of class `least` may be claimed now; 0 or less for none.

        The rule: of each class and all better ones together, at most one batch waits in front of
        the engine. Every step with a free slot and free blocks shortens that line, so slots fill as
        fast as they free, and what cannot run here yet stays where any worker can claim it. Running
        requests are counted as the best ones held: if they are not, they can be preempted.

        None while a request of this class or a better one is on trial (see Delivery): should it
        kill this worker, each that has published nothing would be charged with an attempt. None
        while too many ended claims cannot be committed.
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
            # Its leases are left to expire: it would claim the same requests again, and hold them.
            self._stopping.wait(FULL_SECONDS)
            return
        room = self.room()
        if room > 0 and self._clock() >= self._next_recovery:
            # What nobody has claimed, nobody may be able to: each alone, so that it harms no other.
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
        """While the line is full, still read requests of a better class than those that fill it.

        Otherwise waiting bulk requests would keep an urgent one from ever reaching the engine,
        which could preempt for it.
        """
        entries: list[IngressEntry] = []
        if self._clock() >= self._next_better:
            depth = self._contact.call("read", self._broker.queue_depth)
            best = max((priority for priority, count in depth.items() if count), default=None)
            if best is not None and (room := min(self.room(Priority(best)), depth[best])) > 0:
                entries = self._read(room, block_seconds=0.0)
                if any(entry.priority < best for entry in entries):
                    # The urgent one is delivered to somebody already; do not go on reading bulk.
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
        """End the burst, unless leases have expired: the keeper has still to queue their requests.

        It may do so only after it was in contact for the time of one lease, which is longer than
        most bursts. If each burst left that to the next one, nobody would ever do it.
        """
        if self._contact.call("read", self._broker.num_expired_leases) > 0:
            self._stopping.wait(FULL_SECONDS)
            return
        self._say_what_is_left()
        self._stopping.set()
        self._on_queue_empty()

    def _say_what_is_left(self) -> None:
        """Warn of requests that a burst leaves, as they are paused or scheduled for later."""

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
        """Entries delivered and not claimed: to this worker earlier, or to others a lease ago.

        At most `room`. The rest stays pending for this worker, and the next look finds it.
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
            # All before the first is tokenized: that may outlast a lease, and only open claims are
            # renewed.
            opened = self._opened(now, now_ms=now_ms)
        # Before the engine gets a request that may kill it: a released claim is no attempt.
        self._give_back(later)
        for answer, delivery, request in self._vitals.each(self._thread, opened):
            self._admit(answer, delivery, request, now_ms=now_ms)

    def _in_turn(self, claimed: Sequence[Taken]) -> tuple[Sequence[Taken], Sequence[Taken]]:
        """Those to take in now, and those to give back, for another worker or our next read.

        A process killed in a step does not say which request was to blame. If all that it ran began
        together again, the innocent would be charged with as many attempts as the culprit and be
        given up with it. So each begins alone, until it has published something or has ended.
        """
        count = next((n for n, (_, it) in enumerate(claimed) if it.attempts > 1), len(claimed))
        self._is_careful = count < len(claimed)
        if count == 0 and not self._outbox.has_trial(Priority.LOW):
            count = 1
        elif count == 0:
            self._next_better = self._clock() + BETTER_PAUSE_SECONDS
        return claimed[:count], claimed[count:]

    def _give_back(self, claimed: Sequence[Taken]) -> None:
        """Release claims that are not opened; if that fails, their leases expire."""
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
                # Its lease expires and hands it over; the others of the batch go on.
                _log.error("not taken in", request_id=entry.request_id, error=str(error))
                continue
            if found:
                opened.append((answer, *found))
        return opened

    def _claim(self, entries: list[IngressEntry]) -> list[Taken]:
        """Claim the entries; returns those that this worker got."""
        claim = partial(self._broker.claim, entries, fingerprint=self._served.fingerprint)
        try:
            answers = self._contact.call("claim", claim)
        except ProtocolError as error:
            # The reply is none that our scripts give. The entries stay pending, and what was
            # claimed comes back when its lease expires.
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
        """Open a Delivery for a claimed request; None when the request ended here instead."""
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
        convert = self._served.tokenizer.with_texts
        delivery = Delivery(
            key_of(claimed.claim), claimed.claim, origin, self._shard, wire_logprob=convert
        )
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
        """Hand one open request to the engine, or end it with a typed error."""
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
            # If the claim was lost after it was opened, the abort came before the request, and the
            # engine would run it to its end for nobody.
            if claimed.cancel_requested or not self._outbox.holds(delivery.key):
                self._loop.abort(delivery.key, FinishReason.CANCELLED)

    def _refuse_to_resume(self, delivery: Delivery) -> None:
        origin = delivery.origin
        fingerprints = {"before": origin.other_fingerprint, "here": origin.fingerprint}
        _log.warning("not resumable", **origin.names, **fingerprints)
        self._outbox.end(delivery.key, not_resumable)

    def _note_resume(self, origin: Origin) -> None:
        """Count and log a request that an earlier claim has begun."""
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
        """End a request that cannot be decoded or continued as a dead letter; keeps its bytes."""
        info = short_error(reason, str(error))
        bury = partial(self._broker.dead_letter, claim, f"{reason}: {info.message}", error=info)
        self._contact.call("bury", bury)
        self._metrics.dead_lettered[reason].inc()
        self._metrics.finished["rejected"].inc()
        names = {"request_id": claim.request_id, "epoch": claim.epoch}
        _log.warning("dead letter", **names, reason=reason, error=info.message)
