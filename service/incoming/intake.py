"""Takes requests in: decides how many and when, reads and claims them.

Does not know what they ask: Reception opens what is claimed, and hands it to the engine.
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

#: Pause before the next look while nothing may be claimed.
FULL_SECONDS = 0.02
#: Pause before looking for a more urgent request again, after a look that found none to take in.
BETTER_PAUSE_SECONDS = 0.2
#: Most claims that have ended and are not committed yet. Without a limit, a worker whose commits
#: fail and whose claims succeed, as when a durable queue's disk hangs, would claim the whole queue.
MAX_ENDED_CLAIMS = 1024
#: In a burst, how long one read may wait while the engine still has work.
BURST_BLOCK_SECONDS = 0.02
#: Pause of a burst that is done, between two looks whether others have left what it must take over.
BURST_LOOK_SECONDS = 0.1

#: An entry of the ingress stream, and the reply to its claim.
Taken = tuple[IngressEntry, Claimed]

_Result = TypeVar("_Result")
_log = structlog.get_logger("service.incoming.intake")


class Intake:
    """Reads one shard of a queue for one engine. `run` is a thread's work.

    `num_intakes` of them feed the same engine: each takes its share of the room, rounded up, so
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
        #: In a burst: since when there is nothing to take in, on the broker's clock.
        self._done_ms: int | None = None
        #: When to look again for what nobody has claimed, of each class or better.
        self._next_recovery = dict.fromkeys(Priority, clock())

    def run(self) -> None:
        """Take requests in until stopped; in a burst, until none are left and all have ended."""
        while not self._stopping.is_set():
            self._vitals.beat(self._thread)
            try:
                self._round()
            except QuireError as error:
                # Entries that a lost reply delivered are found by the next recovery. Claims that it
                # granted, and that were asked for in vain, come back when their leases expire.
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
        requests are counted as the best ones held: if they are not, they can be preempted. Those
        whose constraints are compiled are in a line of their own, of the same length.

        None while a trial forbids it (see Trials), or too many ended claims cannot be committed.
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
            # Its leases are left to expire: it would claim the same requests again, and hold them.
            self._stopping.wait(FULL_SECONDS)
            return
        self._recover(Priority.LOW)
        room = self.room()
        was_done = self._outbox.is_empty
        # Looked at before the read, which then finds what was queued again until the look.
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
        """While the line is full, still read requests of a better class than those that fill it.

        Otherwise waiting bulk requests would keep an urgent one from ever reaching the engine,
        which could preempt for it. What the queue shows may be delivered to somebody already, who
        may be dead: no other class is read in its place, and it is recovered like any other.
        """
        entries: list[IngressEntry] = []
        if self._clock() >= self._next_better:
            depth = self._contact.call("read", self._broker.queue_depth)
            waiting = [Priority(level) for level, count in depth.items() if count]
            # A better class has as much room or more.
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
        """Whether a burst that is done may still have to take over what other workers hold.

        A lease that has expired is the keeper's to see to, which may do so only after it was in
        contact for the time of one lease. That is longer than most bursts: if each left it to the
        next one, nobody would ever do it. Who died within the last lease looks as if alive. So of
        all who hold something a sign of life is awaited, as they give it every third of a lease.
        """

        def look() -> bool:
            broker = self._broker
            if self._done_ms is None:
                self._done_ms = broker.now_ms()
            return broker.num_expired_leases() > 0 or broker.num_unheard(self._done_ms) > 0

        return self._contact.call("read", look)

    def _end_burst(self) -> None:
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
        """Take in what was left unclaimed of class `least` or better, if a look for it is due."""
        room = self.room(least)
        if room <= 0 or self._clock() < self._next_recovery[least]:
            return
        # What nobody has claimed, nobody may be able to: each alone, so that it harms no other.
        for entry in self._vitals.each(self._thread, self._left_unclaimed(room, least)):
            self._take_in([entry])

    def _left_unclaimed(self, room: int, least: Priority) -> list[IngressEntry]:
        """Entries delivered and not claimed: to this worker earlier, or to others a lease ago.

        At most `room`. The rest stays pending for this worker, and the next look finds it.
        """
        # Also after a flush or a failover; autoscalers watch the group before there is any entry.
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
            # Those of worse classes are due when they were: there was no look at them.
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
            # The read was under way when we were told to stop.
            self._give_back(claimed)
            return
        trials = [answer.trial_tokens for _, answer in claimed]
        first = Priority(claimed[0][0].priority)
        with self._trials.beginning(trials, first=first) as count:
            if count == 0:
                # Read again at once, it would only be given back again.
                self._next_better = self._clock() + BETTER_PAUSE_SECONDS
            # All before the first is tokenized: that may outlast a lease, and only open claims are
            # renewed.
            opened = self._open(claimed[:count], now_ms=now_ms)
        # Before the engine gets a request that may kill it: a released claim is no attempt.
        self._give_back(claimed[count:])
        for each in self._vitals.each(self._thread, opened):
            self._reception.admit(each, now_ms=now_ms)

    def _open(self, claimed: Sequence[Taken], *, now_ms: int) -> list[Opened]:
        # One line for all: the engine begins with the first while the next are admitted.
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
        """Claim the entries; returns when that was, and those that this worker got."""
        # The same ones with each try, so that it is told what an earlier one has claimed unheard.
        owners = [new_owner() for _ in entries]

        def claim() -> tuple[int, Sequence[Claimed | NotClaimed]]:
            now_ms = self._broker.now_ms()
            fingerprint = self._fingerprint
            return now_ms, self._broker.claim(entries, fingerprint=fingerprint, owners=owners)

        try:
            now_ms, answers = self._until_answered("claim", claim)
        except ProtocolError as error:
            # The reply is none that our scripts give. The entries stay pending, and what was
            # claimed comes back when its lease expires.
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
        """Repeat an idempotent call while Redis cannot serve: it may have done it all the same.

        A claim of which nobody knows ends with its lease, as if it had killed its worker, and its
        request pays with an attempt; so does one that cannot be given back. Raises what the last
        try did when stopped, and once all else has been answered for the time of a lease: the claim
        may be another's by then.
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
