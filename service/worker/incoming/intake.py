"""Takes requests in: decides how many and when, finds those that rank first, and claims them.

Does not know their contents: Reception opens claimed requests and passes them to the engine.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from time import monotonic
from typing import TypeVar

import structlog

from engine.request import Priority
from quire.errors import UNAVAILABLE, ProtocolError, QuireError
from quire.queue.claim.claim import Claimed, NotClaimed, NotClaimedReason
from quire.queue.claim.ingress import Candidate
from quire.queue.rank.policy import QueuePolicy
from quire.queue.request.claims import new_owner
from quire.queue.roles import WorkerSide
from service.worker.incoming.candidates import Candidates
from service.worker.incoming.compiling import Compiling
from service.worker.incoming.reception import Opened, Reception
from service.worker.incoming.trials import Trials
from service.worker.loop import EngineLoop
from service.worker.observe.metrics import Metrics
from service.worker.observe.vitals import Vitals
from service.worker.outgoing.contact import LONGEST_PAUSE_SECONDS, Contact, kind_of, pauses
from service.worker.outgoing.outbox import Outbox
from service.worker.settings.config import Settings

#: Pause before the next round while nothing may be claimed.
FULL_SECONDS = 0.02
#: Pause before the next search beyond a full line, after one that found a suspect during a trial.
TRIAL_PAUSE_SECONDS = 0.2
#: Most claims that have ended and are not committed yet. Without a limit, a worker whose claims
#: succeed and whose commits fail would claim the whole queue. A hanging disk under a durable queue
#: has this effect.
MAX_ENDED_CLAIMS = 1024
#: In a burst, how long one read may wait while the engine still has work.
BURST_BLOCK_SECONDS = 0.02
#: Policies under which a better class takes precedence.
CLASS_POLICIES = ("priority", "adaptive")
#: After these answers to a claim the request still waits, in front of all others.
STILL_WAITING = (NotClaimedReason.REFUSED, NotClaimedReason.DAMAGED)
#: Pause between two searches of a finished burst for requests of other workers to take over.
BURST_LOOK_SECONDS = 0.1

#: Where a claimed request was found, and the reply to its claim.
Taken = tuple[Candidate, Claimed]

_Result = TypeVar("_Result")
_log = structlog.get_logger("service.worker.incoming.intake")


class Intake:
    """Claims from one shard of a queue for one engine. A thread of its own calls `run`.

    `num_intakes` intakes feed the same engine. Each takes its share of the room, rounded up, so
    that together they claim hardly more than one would. `fingerprint` names the engine in claims.
    `policy` is that of the engine, by which the queue is ranked from now on; it runs `max_num_seqs`
    requests at once.
    """

    def __init__(
        self,
        broker: WorkerSide,
        outbox: Outbox,
        *,
        reception: Reception,
        fingerprint: str,
        policy: QueuePolicy,
        max_num_seqs: int,
        place: int = 0,
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
        self._policy = policy
        self._max_num_seqs = max_num_seqs
        self._candidates = Candidates(
            broker, contact=contact, skip_seconds=settings.lease_seconds, clock=clock
        )
        self._is_announced = False
        self._place = place
        self._thread = f"intake-{place}"
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
        self._next_search = clock()
        self._next_care = clock()
        #: In a burst: the time since which nothing can be taken in, on the broker's clock.
        self._done_ms: int | None = None

    def run(self) -> None:
        """Take requests in until stopped. A burst also ends when all requests have ended."""
        with closing(self._reception):
            while not self._stopping.is_set():
                self._vitals.beat(self._thread)
                try:
                    self._round()
                except QuireError as error:
                    # Claims that were granted in a lost reply come back when their leases expire.
                    if not isinstance(error, UNAVAILABLE):
                        _log.exception("queue cannot be read")
                    self._stopping.wait(LONGEST_PAUSE_SECONDS)

    def stop(self) -> None:
        """Make `run` return after at most one more read, whose claims are given back."""
        self._stopping.set()
        self._reception.interrupt()

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
        if not self._may_claim(least):
            return 0
        compiling = min(self._compiling.num_waiting(least), settings.claim_batch)
        held = outbox.num_open(least) - compiling
        room = settings.claim_batch - max(0, held - self._loop.num_running)
        return self._trials.limit(-(-room // self._num_intakes))

    def _may_claim(self, least: Priority) -> bool:
        most = self._max_num_seqs + self._settings.claim_batch + MAX_ENDED_CLAIMS
        is_full = self._outbox.num_claims >= most or not self._reception.has_room
        return not is_full and not self._trials.forbid(least)

    def _round(self) -> None:
        if self._vitals.overdue:
            # A thread of this worker hangs, so its leases are left to expire. The worker must not
            # claim the same requests again, because it would only hold them.
            self._stopping.wait(FULL_SECONDS)
            return
        self._take_care()
        room = self.room()
        was_done = self._outbox.is_empty
        # Checked before the read, so that the read finds everything that was requeued before the
        # check.
        is_last = self._settings.burst and was_done and not self._awaits_others()
        if room > 0:
            found = self._peek(room, block_seconds=self._block_seconds(was_done=was_done))
        else:
            found = self._peek_beyond_the_line()
        self._take_in(found)
        if found or not was_done:
            self._done_ms = None
        elif is_last:
            self._end_burst()
        elif self._settings.burst:
            self._stopping.wait(BURST_LOOK_SECONDS)

    def _peek_beyond_the_line(self) -> list[Candidate]:
        """While no more requests may wait, find those that must not wait for room.

        These are requests of a better class than the waiting ones, because the engine can preempt
        for them, and one that ranks before every waiting request. Otherwise requests that were
        claimed earlier would come before one that ranks better.
        """
        found: list[Candidate] = []
        if self._clock() >= self._next_search:
            found = self._peek_better_class() or self._peek_first_in_line()
        if not found:
            self._stopping.wait(FULL_SECONDS)
        return found

    def _peek_better_class(self) -> list[Candidate]:
        if self._settings.policy not in CLASS_POLICIES:
            return []
        # A better class has as much room or more.
        least = min((level for level in Priority if self.room(level) > 0), default=None)
        return [] if least is None else self._peek(self.room(least), least=least)

    def _peek_first_in_line(self) -> list[Candidate]:
        allowed = (level for level in Priority if self._may_claim(level))
        least = min(allowed, default=None)
        first = self._outbox.first_rank(place=self._place, num_running=self._loop.num_running)
        if least is None or first is None:
            return []
        return [one for one in self._peek(1, least=least) if one.rank < first]

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
                place=self._place,
                waiting=waiting,
                scheduled=scheduled,
                paused=reason is not None,
            )

    def _peek(
        self, count: int, *, least: Priority = Priority.LOW, block_seconds: float = 0.0
    ) -> list[Candidate]:
        """Up to `count` requests, by rank."""
        found, is_skipped = self._candidates.find(count, least=least, block_seconds=block_seconds)
        if is_skipped:
            self._stopping.wait(FULL_SECONDS)
        return found

    def _take_care(self) -> None:
        """Once per lease, repair the streams and the policy of the shard."""
        if self._clock() < self._next_care:
            return
        broker = self._broker
        # The groups may be lost after a flush or a failover. They must also exist before the first
        # entry, because autoscalers watch them.
        self._contact.call("recover", broker.ensure_groups)
        announce = partial(broker.announce, self._policy, replaces=not self._is_announced)
        if self._contact.call("recover", announce):
            for restored in self._contact.call("recover", broker.rank_anew):
                self._metrics.restored[restored.lost].inc()
        self._is_announced = True
        self._contact.call("recover", broker.balance)
        self._next_care = self._clock() + self._settings.lease_seconds

    def _take_in(self, candidates: list[Candidate]) -> None:
        if not candidates:
            return
        now_ms, claimed = self._claim(candidates)
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
                # If it were claimed again at once, it would be given back again.
                self._next_search = self._clock() + TRIAL_PAUSE_SECONDS
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
        _log.debug("requests claimed", request_ids=[one.request_id for one, _ in claimed])
        found = (
            self._reception.open(candidate, answer, now_ms=now_ms)
            for candidate, answer in self._vitals.each(self._thread, claimed)
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

    def _claim(self, candidates: list[Candidate]) -> tuple[int, list[Taken]]:
        """Claim requests; returns the broker's time and the claims that this worker got."""
        # Every attempt uses the same owners. So it gets the claims of an earlier attempt whose
        # reply was lost.
        owners = [new_owner() for _ in candidates]

        def claim() -> tuple[int, Sequence[Claimed | NotClaimed]]:
            now_ms = self._broker.now_ms()
            answers = self._broker.claim(
                candidates,
                fingerprint=self._fingerprint,
                owners=owners,
                worker=self._worker,
                affinity_seconds=self._settings.session_affinity_seconds,
            )
            return now_ms, answers

        try:
            now_ms, answers = self._until_answered("claim", claim)
        except ProtocolError as error:
            # No script of ours gives such a reply. Claimed requests come back when their leases
            # expire.
            ids = [one.request_id for one in candidates]
            _log.error("not claimed", request_ids=ids, error=str(error))
            self._candidates.skip(ids)
            return 0, []
        claimed = []
        for candidate, answer in zip(candidates, answers, strict=True):
            if isinstance(answer, NotClaimed):
                self._note_refusal(answer)
            else:
                claimed.append((candidate, answer))
        # A turn that is kept for its worker says nothing about how many workers claim.
        num_kept = sum(_is_kept(answer) for answer in answers)
        self._candidates.note(len(claimed), of=len(candidates) - num_kept)
        return now_ms, claimed

    def _note_refusal(self, answer: NotClaimed) -> None:
        _log.debug("not claimed", request_id=answer.request_id, reason=str(answer.reason))
        if answer.ended and answer.reason is NotClaimedReason.EXPIRED:
            self._metrics.finished["deadline"].inc()
        if _is_kept(answer):
            self._candidates.skip([answer.request_id], seconds=answer.retry_seconds)
        elif not answer.ended and answer.reason in STILL_WAITING:
            self._candidates.skip([answer.request_id])

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


def _is_kept(answer: Claimed | NotClaimed) -> bool:
    """Whether it waits for the worker of the last turn of its session."""
    return isinstance(answer, NotClaimed) and answer.reason is NotClaimedReason.KEPT
