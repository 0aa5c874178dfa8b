"""Takes requests in: decides how many and when, reads them and claims them.

Does not know their contents: Reception opens claimed requests and passes them to the engine.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import TypeVar

import structlog

from engine.request import Priority
from quire.broker.broker import Broker
from quire.errors import ProtocolError, QuireError
from quire.transitions.values import Claimed, IngressEntry, NotClaimed, NotClaimedReason, new_owner
from quire.wire.protocol import Priority as WirePriority
from service.incoming.compiling import Compiling
from service.incoming.reception import Opened, Reception
from service.incoming.trials import Trials
from service.loop import EngineLoop
from service.observe.metrics import Metrics
from service.observe.vitals import Vitals
from service.outgoing.contact import LONGEST_PAUSE_SECONDS, UNAVAILABLE, Contact, kind_of, pauses
from service.outgoing.outbox import Outbox
from service.settings.config import Settings

#: Pause before the next round while nothing may be claimed.
FULL_SECONDS = 0.02
#: Pause before the next search for a more urgent request, after a search that found none.
BETTER_PAUSE_SECONDS = 0.2
#: Most claims that have ended and are not committed yet. Without a limit, a worker whose claims
#: succeed and whose commits fail would claim the whole queue. A hanging disk under a durable queue
#: has this effect.
MAX_ENDED_CLAIMS = 1024
#: In a burst, how long one read may wait while the engine still has work.
BURST_BLOCK_SECONDS = 0.02
#: Pause between two searches of a finished burst for requests of other workers to take over.
BURST_LOOK_SECONDS = 0.1

#: An entry of the ingress stream, and the reply to its claim.
Taken = tuple[IngressEntry, Claimed]

_Result = TypeVar("_Result")
_log = structlog.get_logger("service.incoming.intake")


class Intake:
    """Reads one shard of a queue for one engine. A thread of its own calls `run`.

    `num_intakes` intakes feed the same engine. Each takes its share of the room, rounded up, so
    that together they claim hardly more than one would. `fingerprint` names the engine in claims.
    """

    def __init__(
        self,
        broker: Broker,
        outbox: Outbox,
        *,
        reception: Reception,
        fingerprint: str,
        shard: int = 0,
        num_intakes: int = 1,
        loop: EngineLoop,
        compiling: Compiling,
        settings: Settings,
        vitals: Vitals,
        contact: Contact,
        metrics: Metrics,
        on_queue_empty: Callable[[], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._broker = broker
        self._outbox = outbox
        self._reception = reception
        self._trials = Trials(outbox)
        self._fingerprint = fingerprint
        self._shard = shard
        self._thread = f"intake-{shard}"
        self._num_intakes = num_intakes
        self._loop = loop
        self._compiling = compiling
        self._settings = settings
        self._worker = settings.worker
        self._vitals = vitals
        self._contact = contact
        self._metrics = metrics
        self._on_queue_empty = on_queue_empty
        self._clock = clock
        self._stopping = threading.Event()
        self._next_better = clock()
        #: In a burst: the time since which nothing can be taken in, on the broker's clock.
        self._done_ms: int | None = None
        #: For each class: when to search again for unclaimed entries of it and all better classes.
        self._next_recovery = dict.fromkeys(Priority, clock())

    def run(self) -> None:
        """Take requests in until stopped. A burst also ends when all requests have ended."""
        while not self._stopping.is_set():
            self._vitals.beat(self._thread)
            try:
                self._round()
            except QuireError as error:
                # Entries whose delivery was in a lost reply are found by the next recovery. Claims
                # that were granted in a lost reply come back when their leases expire.
                if not isinstance(error, UNAVAILABLE):
                    _log.exception("queue cannot be read")
                self._stopping.wait(LONGEST_PAUSE_SECONDS)

    def stop(self) -> None:
        """Make `run` return after at most one more read, whose claims are given back."""
        self._stopping.set()

    def room(self, least: Priority = Priority.LOW) -> int:
        """The number of requests of class `least` that may be claimed now; 0 or less for none.

        The rule: for each class, at most one batch of requests of this class and all better ones
        waits in front of the engine. Each step that has a free slot and free blocks takes requests
        from there, so freed slots are filled at once. Requests that cannot run here yet stay in the
        queue, where any worker can claim them. Running requests count as the best ones held,
        because worse ones can be preempted. Requests whose constraints are being compiled wait in a
        separate line of the same length.

        Returns 0 while a trial forbids claims (see Trials), and while too many ended claims are not
        committed.
        """
        settings, outbox = self._settings, self._outbox
        most = settings.max_num_seqs + settings.claim_batch + MAX_ENDED_CLAIMS
        if self._trials.forbid(least) or outbox.num_claims >= most:
            return 0
        compiling = min(self._compiling.num_waiting(least), settings.claim_batch)
        held = outbox.num_open(least) - compiling
        room = settings.claim_batch - max(0, held - self._loop.num_running)
        return self._trials.limit(-(-room // self._num_intakes))

    def _round(self) -> None:
        if self._vitals.overdue:
            # A thread of this worker hangs, so its leases are left to expire. The worker must not
            # claim the same requests again, because it would only hold them.
            self._stopping.wait(FULL_SECONDS)
            return
        self._recover(Priority.LOW)
        room = self.room()
        was_done = self._outbox.is_empty
        # Checked before the read, so that the read finds everything that was requeued before the
        # check.
        is_last = self._settings.burst and was_done and not self._awaits_others()
        if room > 0:
            entries = self._read(room, block_seconds=self._block_seconds(was_done=was_done))
        else:
            entries = self._read_better()
        self._take_in(entries)
        if entries or not was_done:
            self._done_ms = None
        elif is_last:
            self._end_burst()
        elif self._settings.burst:
            self._stopping.wait(BURST_LOOK_SECONDS)

    def _read_better(self) -> list[IngressEntry]:
        """While no more requests may wait, read requests of a better class than the waiting ones.

        Otherwise waiting bulk requests would keep an urgent one from the engine, which could
        preempt for it. The queue's depth also counts entries that were delivered to another worker,
        which may be dead. They are recovered like all others, and no other class is read instead.
        """
        entries: list[IngressEntry] = []
        if self._clock() >= self._next_better:
            depth = self._contact.call("read", self._broker.queue_depth)
            waiting = [Priority(level) for level, count in depth.items() if count]
            # A better class has at least as much room.
            least = min((level for level in waiting if self.room(level) > 0), default=None)
            if least is not None:
                self._recover(least)
                if (room := self.room(least)) > 0:
                    entries = self._read(room, least=least, block_seconds=0.0)
                if not entries:
                    self._next_better = self._clock() + BETTER_PAUSE_SECONDS
        if not entries:
            self._stopping.wait(FULL_SECONDS)
        return entries

    def _block_seconds(self, *, was_done: bool) -> float:
        block = self._settings.block_seconds
        if not self._settings.burst:
            return block
        return 0.0 if was_done else min(block, BURST_BLOCK_SECONDS)

    def _awaits_others(self) -> bool:
        """Whether a finished burst may still have to take over requests of other workers.

        The keeper requeues requests with expired leases, but only after it was in contact for the
        time of one lease. Most bursts are shorter. If each burst left this to the next one, no
        burst would ever do it. And a worker that died within the last lease still looks alive. So a
        burst waits for a heartbeat of every worker that holds a request; heartbeats come every
        third of a lease.
        """

        def check() -> bool:
            broker = self._broker
            if self._done_ms is None:
                self._done_ms = broker.now_ms()
            return broker.num_expired_leases() > 0 or broker.num_unheard(self._done_ms) > 0

        return self._contact.call("read", check)

    def _end_burst(self) -> None:
        self._warn_of_the_rest()
        self._stopping.set()
        self._on_queue_empty()

    def _warn_of_the_rest(self) -> None:
        """Warn of requests that a burst leaves because they are paused or scheduled for later."""

        def count() -> tuple[int, int, str | None]:
            broker = self._broker
            waiting = sum(broker.queue_depth().values())
            return waiting, broker.num_scheduled(), broker.pause_reason()

        waiting, scheduled, reason = self._contact.call("read", count)
        if waiting or scheduled:
            _log.warning(
                "burst leaves requests",
                shard=self._shard,
                waiting=waiting,
                scheduled=scheduled,
                paused=reason is not None,
            )

    def _read(
        self, count: int, *, block_seconds: float, least: Priority = Priority.LOW
    ) -> list[IngressEntry]:
        read = partial(
            self._broker.read_ingress,
            self._worker,
            count=count,
            block_seconds=block_seconds,
            least=WirePriority(least),
        )
        return self._contact.call("read", read)

    def _recover(self, least: Priority) -> None:
        """Take in unclaimed entries of class `least` or better, if a search for them is due."""
        room = self.room(least)
        if room <= 0 or self._clock() < self._next_recovery[least]:
            return
        # An entry may be unclaimed because its claim fails. So each is claimed alone, and a failure
        # does not stop the others.
        for entry in self._vitals.each(self._thread, self._left_unclaimed(room, least)):
            self._take_in([entry])

    def _left_unclaimed(self, room: int, least: Priority) -> list[IngressEntry]:
        """Entries that were delivered and not claimed, at most `room`.

        They were delivered to this worker earlier, or to another one at least a lease ago. All
        others stay pending for this worker, and the next search finds them.
        """
        # The groups may be lost after a flush or a failover. They must also exist before the first
        # entry, because autoscalers watch them.
        self._contact.call("recover", self._broker.ensure_groups)
        lease = self._settings.lease_seconds
        recover = partial(
            self._broker.recover_entries,
            self._worker,
            min_idle_seconds=lease,
            count=room,
            least=WirePriority(least),
        )
        entries = self._contact.call("recover", recover)
        if len(entries) < room:
            # Worse classes were not searched, so their next search stays due when it was.
            seen = [level for level in Priority if level >= least]
            self._next_recovery |= dict.fromkeys(seen, self._clock() + lease)
        self._metrics.redelivered.inc(min(len(entries), room))
        return entries[:room]

    def _take_in(self, entries: list[IngressEntry]) -> None:
        if not entries:
            return
        now_ms, claimed = self._claim(entries)
        if not claimed:
            return
        if self._stopping.is_set():
            # `stop` was called during the read.
            self._give_back(claimed)
            return
        trials = [answer.trial_tokens for _, answer in claimed]
        first = Priority(claimed[0][0].priority)
        with self._trials.beginning(trials, first=first) as count:
            if count == 0:
                # If it were read again at once, it would be given back again.
                self._next_better = self._clock() + BETTER_PAUSE_SECONDS
            # All are opened before the first is tokenized: that may take longer than a lease, and
            # only the leases of open claims are renewed.
            opened = self._open(claimed[:count], now_ms=now_ms)
        # Given back before the engine gets a suspect: if that kills the worker, a released claim
        # loses no attempt.
        self._give_back(claimed[count:])
        for each in self._vitals.each(self._thread, opened):
            self._reception.admit(each, now_ms=now_ms)

    def _open(self, claimed: Sequence[Taken], *, now_ms: int) -> list[Opened]:
        # One line for all claims: the engine starts with the first while the next are admitted.
        _log.debug("requests claimed", request_ids=[entry.request_id for entry, _ in claimed])
        found = (
            self._reception.open(entry, answer, now_ms=now_ms)
            for entry, answer in self._vitals.each(self._thread, claimed)
        )
        return [opened for opened in found if opened is not None]

    def _give_back(self, claimed: Sequence[Taken]) -> None:
        """Release claims that are not opened; if that fails, their leases expire."""
        if not claimed:
            return
        claims = [answer.claim for _, answer in claimed]
        try:
            self._until_answered("release", partial(self._broker.release, claims))
        except QuireError as error:
            ids = [claim.request_id for claim in claims]
            _log.error("not given back", request_ids=ids, error=str(error))

    def _claim(self, entries: list[IngressEntry]) -> tuple[int, list[Taken]]:
        """Claim the entries; returns the broker's time and the claims that this worker got."""
        # Every attempt uses the same owners. So it gets the claims of an earlier attempt whose
        # reply was lost.
        owners = [new_owner() for _ in entries]

        def claim() -> tuple[int, Sequence[Claimed | NotClaimed]]:
            now_ms = self._broker.now_ms()
            fingerprint = self._fingerprint
            return now_ms, self._broker.claim(entries, fingerprint=fingerprint, owners=owners)

        try:
            now_ms, answers = self._until_answered("claim", claim)
        except ProtocolError as error:
            # No script of ours gives such a reply. The entries stay pending, and claimed requests
            # come back when their leases expire.
            ids = [entry.request_id for entry in entries]
            _log.error("not claimed", request_ids=ids, error=str(error))
            return 0, []
        claimed = []
        for entry, answer in zip(entries, answers, strict=True):
            if isinstance(answer, NotClaimed):
                _log.debug("not claimed", request_id=entry.request_id, reason=str(answer.reason))
                if answer.ended and answer.reason is NotClaimedReason.EXPIRED:
                    self._metrics.finished["deadline"].inc()
            else:
                claimed.append((entry, answer))
        return now_ms, claimed

    def _until_answered(self, operation: str, function: Callable[[], _Result]) -> _Result:
        """Repeat an idempotent call while Redis is unavailable: it may have succeeded nevertheless.

        A granted claim whose reply is lost ends with its lease, as if the request had killed its
        worker, and costs it an attempt. So does a claim that cannot be given back. The call is
        repeated until it gets an answer. Raises the last error when stopped, or if access is
        denied. Raises it also after the time of a lease in which other calls were answered: the
        claim may belong to another worker by then.
        """
        began, lease = self._clock(), self._settings.lease_seconds
        for pause in self._vitals.each(self._thread, pauses()):
            try:
                return self._contact.call(operation, function)
            except UNAVAILABLE as error:
                waited = min(self._clock() - began, self._contact.unbroken_seconds)
                if kind_of(error) == "access" or waited >= lease or self._stopping.wait(pause):
                    raise
        raise AssertionError("pauses never end")
