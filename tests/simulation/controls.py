"""Doctored scripts: each breaks one law on purpose, to show that the search would see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.simulation.model_state import (
    NOBODY,
    Call,
    Chunk,
    End,
    Request,
    Shard,
    changed,
    is_parked,
    with_old_letters,
    with_rank,
    with_request,
    with_ticket,
)
from tests.simulation.protocol_model import Scripts
from tests.simulation.world import Scenario


@dataclass(frozen=True, slots=True)
class Control:
    """`law`: how the sentence begins that must be found."""

    scenario: Scenario
    law: str
    kind: type[Scripts] = Scripts

    @property
    def name(self) -> str:
        return self.scenario.name


class NoFence(Scripts):
    def holds(self, request: Request, call: Call) -> bool:
        return request.state == "running"


class EpochAlone(Scripts):
    def holds(self, request: Request, call: Call) -> bool:
        return request.state == "running" and request.epoch == call.epoch


class LogUnread(Scripts):
    """Nobody looks whether the record says of its log what there is."""

    def agreed(self, shard: Shard, index: int) -> tuple[Shard, End | None]:
        return shard, None


class FenceOpenAfterTheEnd(LogUnread):
    def holds(self, request: Request, call: Call) -> bool:
        return (request.epoch, request.owner) == (call.epoch, call.owner) != (0, NOBODY)


class NoRewind(Scripts):
    """Tokens are written wherever they begin."""

    def commit(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        request = shard.requests[call.request]
        if not request or not self.holds(request, call) or call.start <= request.published:
            return super().commit(shard, call)
        return super().commit(shard, call._replace(start=request.published))


class ReplaysWritten(Scripts):
    """Tokens that are in the log already are written again."""

    def commit(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        request = shard.requests[call.request]
        if not request or not self.holds(request, call) or call.start >= request.published:
            return super().commit(shard, call)
        return super().commit(shard, call._replace(start=request.published))


class NeverRestored(Scripts):
    """What has lost its rank and all tickets waits until its time is over."""

    def restore(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        return shard, ""


class BooksForgotten(NeverRestored):
    """A request whose keys have expired stays in the books; RESTORE would strike it out."""

    def reap(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        after, reply = super().reap(shard, call)
        return (after if reply else after._replace(books=shard.books)), reply


class PauseUnheeded(Scripts):
    """A claim takes a request from a paused queue."""

    def claim(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        after, reply = super().claim(shard._replace(is_paused=False), call)
        return after._replace(is_paused=shard.is_paused), reply


class NeverPromoted(Scripts):
    def promote(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        return shard, ""


class TokensTakenBack(Scripts):
    """A request that is queued again begins from nothing."""

    def put_back(
        self, shard: Shard, index: int, attempts: int, *, is_kept: bool
    ) -> tuple[Shard, str]:
        shard = changed(shard, index, published=0, log=())
        return super().put_back(shard, index, attempts, is_kept=is_kept)


class ReapedAndLost(NeverRestored):
    """A request whose lease has expired gets no rank; RESTORE would see to it."""

    def reap(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        after, reply = super().reap(shard, call)
        return after._replace(ranks=shard.ranks, tickets=shard.tickets), reply


class NeverFreed(Scripts):
    """The end of a turn leaves the next one parked, until RESTORE sees to it."""

    def settled(self, shard: Shard, index: int, reason: str, *, epoch: int) -> tuple[Shard, str]:
        after, state = super().settled(shard, index, reason, epoch=epoch)
        ranks = (0 if index == n else rank for n, rank in enumerate(shard.ranks))
        return after._replace(ranks=tuple(ranks), tickets=shard.tickets), state


class LeftBehind(Scripts):
    """A turn that ends after its entry was lost keeps its place among the open ones."""

    def settled(self, shard: Shard, index: int, reason: str, *, epoch: int) -> tuple[Shard, str]:
        after, state = super().settled(shard, index, reason, epoch=epoch)
        left = [turn for turn in shard.turns if turn.request == index and not turn.has_entry]
        return after._replace(turns=tuple(sorted((*after.turns, *left)))), state


class TurnsUnread(Scripts):
    """A request is ranked whatever earlier turn of its session is open."""

    def submit(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        after, reply = super().submit(shard, call)
        if reply[0] == "created" and is_parked(after, call.request):
            arrival = after.requests[call.request].arrival
            after = with_ticket(with_rank(after, call.request, arrival), call.request)
        return after, reply


class ClaimedOutOfTurn(Scripts):
    """A claim of a parked turn is granted; a server that lost its predecessor had ranked it."""

    def claim(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        after, reply = super().claim(shard._replace(turns=()), call)
        return after._replace(turns=shard.turns), reply


class RefusedAndKept(Scripts):
    """What cannot be claimed stays in its rank set."""

    def claim(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        after, reply = super().claim(shard, call)
        return (after if reply[0] == "claimed" else after._replace(ranks=shard.ranks)), reply


class CancelledAndRanked(Scripts):
    """A request that is cancelled while it waits stays in its rank set."""

    def cancel(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        after, reply = super().cancel(shard, call)
        return after._replace(ranks=shard.ranks), reply


class TicketsLeaked(Scripts):
    """What cancelled and expired requests leave is never used up."""

    def without_surplus(self, shard: Shard, most: int) -> tuple[Shard, int]:
        return shard, 0


class TicketsForgotten(Scripts):
    """What comes back gets no ticket."""

    def put_back(
        self, shard: Shard, index: int, attempts: int, *, is_kept: bool
    ) -> tuple[Shard, str]:
        after, state = super().put_back(shard, index, attempts, is_kept=is_kept)
        return after._replace(tickets=shard.tickets), state


class ArrivalsRenewed(Scripts):
    """What comes back goes behind all others."""

    def enqueue(self, shard: Shard, index: int, *, is_kept: bool) -> tuple[Shard, str]:
        return super().enqueue(shard, index, is_kept=False)


class RankedByAnother(Scripts):
    """RESTORE ranks a request by another arrival than its record tells."""

    def restore(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        after, lost = super().restore(shard, call)
        if not after.ranks[call.request]:
            return after, lost
        return with_rank(after, call.request, after.clock.last_arrival + 1), lost


class AttemptsUncounted(Scripts):
    def ending_due(self, shard: Shard, index: int, attempts: int) -> str:
        return super().ending_due(shard, index, 0)


class LettersUnwritten(Scripts):
    def end_for(self, shard: Shard, index: int, reason: str) -> tuple[Shard, str]:
        after, state = super().end_for(shard, index, reason)
        return after._replace(letters=shard.letters), state


class MovesCounted(Scripts):
    """A claim that published tokens is an attempt like any other."""

    def attempts_of(self, request: Request) -> int:
        return request.attempts


class NeverExpired(Scripts):
    def expire(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        return shard, ""


class RestoredUnranked(Scripts):
    """A request that is told to be restored is in no rank set all the same."""

    def restore(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        after, lost = super().restore(shard, call)
        return (with_rank(after, call.request, 0) if lost == "entry" else after), lost


class RestoredWhileRunning(Scripts):
    """A request that is claimed counts as one that has lost its rank."""

    def restore(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        request = shard.requests[call.request]
        if not request or request.state != "running":
            return super().restore(shard, call)
        return self.enqueue(shard, call.request, is_kept=False)


class SubmittedTwice(Scripts):
    """A submit of a known id begins anew."""

    def submit(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        return super().submit(with_request(shard, call.request, ()), call)


class OldLetterTaken(Scripts):
    """A letter is taken for that of the request that has its id now."""

    def requeue(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        return super().requeue(with_old_letters(shard, call.request, is_old=False), call)


class KeyUnread(Scripts):
    """The holder of an idempotency key is not looked for."""

    def submit(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        return super().submit(shard._replace(key_holder=-1), call)


class ToldTwice(Scripts):
    """Who finds the end in the log tells it, whether it was told or not."""

    def settled_again(self, shard: Shard, index: int, end: End, *, epoch: int) -> tuple[Shard, str]:
        return self.settled(self.told(shard, index, end), index, end.reason, epoch=epoch)


class NeverToldAgain(Scripts):
    """Who finds the end in the log takes it for told."""

    def settled_again(self, shard: Shard, index: int, end: End, *, epoch: int) -> tuple[Shard, str]:
        return self.settled(shard, index, end.reason, epoch=epoch)


class ToldByWorkers(Scripts):
    """An end that no worker writes is not told."""

    def told(self, shard: Shard, index: int, end: End) -> Shard:
        has_worker = shard.requests[index].owner != NOBODY
        return super().told(shard, index, end) if has_worker else shard


class CancelledAndRun(Scripts):
    """A claim takes a request that was cancelled in the queue."""

    def claim(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        request = shard.requests[call.request]
        if not request or request.state != "cancelled":
            return super().claim(shard, call)
        log = tuple(entry for entry in request.log if isinstance(entry, Chunk))
        queued = request._replace(state="queued", has_body=True, log=log)
        return super().claim(with_request(shard, call.request, queued), call)


_ROLLBACK = {"num_rollbacks": 1, "max_attempts": 1, "num_tokens": 1}

_TURNS = {"num_requests": 2, "num_tokens": 0, "max_attempts": 1, "shares_a_session": True}

CONTROLS = (
    Control(Scenario("no fence"), "I4", NoFence),
    Control(Scenario("the epoch alone", **_ROLLBACK), "I4", EpochAlone),
    Control(Scenario("stateful noise", **_ROLLBACK, is_noise_stateful=True), "I1"),
    Control(
        Scenario(
            "stateful noise, no hashes",
            num_rollbacks=1,
            max_attempts=1,
            is_noise_stateful=True,
            may_contradict=True,
            has_hashes=False,
        ),
        "I1",
    ),
    Control(Scenario("tokens taken back"), "I1", TokensTakenBack),
    Control(Scenario("no rewind", num_rollbacks=1), "I2", NoRewind),
    Control(Scenario("replays written"), "I2", ReplaysWritten),
    Control(Scenario("fence open after the end"), "I3", FenceOpenAfterTheEnd),
    Control(Scenario("reaped and lost"), "I5", ReapedAndLost),
    Control(Scenario("cancelled and ranked", may_cancel=True), "I12", CancelledAndRanked),
    Control(Scenario("restored unranked", num_losses=1), "I6", RestoredUnranked),
    Control(Scenario("tickets leaked", may_cancel=True), "I6", TicketsLeaked),
    Control(Scenario("tickets forgotten"), "I13", TicketsForgotten),
    Control(Scenario("arrivals renewed", num_releases=1), "I14", ArrivalsRenewed),
    Control(Scenario("ranked by another"), "I14", RankedByAnother),
    Control(Scenario("never promoted", may_schedule=True), "I6", NeverPromoted),
    Control(Scenario("never freed", **_TURNS), "I15", NeverFreed),
    Control(Scenario("left behind", **_TURNS, num_losses=1), "I15", LeftBehind),
    Control(Scenario("turns unread", **_TURNS), "I15", TurnsUnread),
    Control(Scenario("claimed out of turn", **_TURNS, num_losses=1), "I15", ClaimedOutOfTurn),
    Control(Scenario("refused and kept", num_expiries=1), "I6", RefusedAndKept),
    Control(Scenario("attempts uncounted"), "I7", AttemptsUncounted),
    Control(Scenario("letters unwritten"), "I7", LettersUnwritten),
    Control(Scenario("moves counted"), "I7", MovesCounted),
    Control(Scenario("never expired", may_be_late=True), "I5", NeverExpired),
    Control(Scenario("log unread", num_rollbacks=1, may_be_torn=True), "I2", LogUnread),
    Control(Scenario("never restored", num_losses=1), "I5", NeverRestored),
    Control(Scenario("restored while running"), "I4", RestoredWhileRunning),
    Control(Scenario("submitted twice"), "I8", SubmittedTwice),
    Control(
        Scenario("old letter taken", num_expiries=1, num_requeues=1, num_tokens=0, max_attempts=1),
        "I8",
        OldLetterTaken,
    ),
    Control(Scenario("key unread", num_requests=2, shares_a_key=True), "I8", KeyUnread),
    Control(Scenario("cancelled and run", may_cancel=True), "I9", CancelledAndRun),
    Control(Scenario("told twice", num_rollbacks=1, may_be_torn=True), "I16", ToldTwice),
    Control(Scenario("never told again", num_rollbacks=1, may_be_torn=True), "I16", NeverToldAgain),
    Control(Scenario("told by workers", may_cancel=True), "I16", ToldByWorkers),
    Control(Scenario("pause unheeded", may_pause=True), "I9", PauseUnheeded),
    Control(Scenario("books forgotten", num_expiries=1), "I10", BooksForgotten),
)
