"""The transitions of a request as pure functions, decision by decision as the scripts make them.

Knows no Redis, no clock and no randomness: owners are arguments, and time passes by operations of
its own. `test_model_matches_scripts.py` holds this file and the scripts together.
"""

from __future__ import annotations

from typing import Any

from tests.simulation.accidents import Accidents
from tests.simulation.model_state import (
    NOBODY,
    OPEN,
    WAITING,
    Call,
    Chunk,
    End,
    Request,
    Shard,
    Turn,
    booked,
    changed,
    entered,
    is_parked,
    is_turn,
    lined_up,
    struck_out,
    waiting_anew,
    with_delay,
    with_lease,
    with_letter,
    with_new_arrival,
    with_old_ends,
    with_old_letters,
    with_rank,
    with_request,
    with_turn,
    with_wait,
    without_turn,
)
from tests.simulation.shared_parts import SharedParts, is_named, trial_of

#: The states that CLAIM names when it refuses; all others that are not queued are finished.
SAID = ("running", "scheduled", "cancelled", "expired")

#: The most tickets that a claim consumes, and BALANCE at once.
MAX_CONSUMED, MAX_BALANCED = 5, 256


class Scripts(SharedParts, Accidents):
    """The scripts, with the settings they depend on. Each returns the shard after it and a reply.

    `keyed`: the requests that carry one and the same idempotency key. `in_session`: those that are
    turns of one and the same session.
    """

    def __init__(
        self,
        *,
        max_attempts: int = 2,
        max_backlog: int = 0,
        keyed: frozenset[int] = frozenset(),
        in_session: frozenset[int] = frozenset(),
    ) -> None:
        self.max_attempts = max_attempts
        self.max_backlog = max_backlog
        self.keyed = keyed
        self.in_session = in_session

    def run(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        return getattr(self, call.name)(shard, call)

    # What a producer calls.

    def submit(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies (outcome, request, state) with outcome created, known, full or held."""
        index, holder = call.request, shard.key_holder
        if known := shard.requests[index]:
            return self.found_again(shard, index), ("known", index, known.state)
        if index in self.keyed and holder not in (-1, index):
            if holder != call.holder:
                return shard, ("held", holder, "")
            if known := shard.requests[holder]:
                return self.found_again(shard, holder), ("known", holder, known.state)
        shard = struck_out(shard, index)
        if 0 < self.max_backlog <= sum(bool(wait) for wait in shard.waits):
            return shard, ("full", index, "requests")
        if index in self.keyed:
            shard = shard._replace(key_holder=index)
        state = "scheduled" if call.flag else "queued"
        shard = booked(with_request(shard, index, Request(state)), index, "", state)
        shard = with_old_ends(with_old_letters(waiting_anew(shard, index), index), index)
        if index in self.in_session:
            shard = with_turn(shard, index)
        if call.flag:
            return with_delay(shard, index, "live"), ("created", index, state)
        shard = with_new_arrival(shard, index, number=shard.requests[index].turn)
        return lined_up(shard, index), ("created", index, state)

    def found_again(self, shard: Shard, index: int) -> Shard:
        """A request that is known already gets its lost rank back."""
        is_queued = shard.requests[index].state == "queued"
        return self.ranked_again(shard, index) if is_queued else shard

    def cancel(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies the state after it, "" for an unknown request."""
        request = shard.requests[call.request]
        if not request:
            return shard, ""
        if request.state in WAITING:
            shard = with_delay(shard, call.request, "")
            return self.ended_without_worker(shard, call.request, "cancelled")
        if request.state == "running":
            shard, _ = self.agreed(changed(shard, call.request, cancel=True), call.request)
        return shard, request.state

    # What a worker calls.

    def claim(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies ("claimed", what a worker learns of the request) or (reason, is ended)."""
        index, request = call.request, shard.requests[call.request]
        if request and request.state == "running" and request.owner == call.owner:
            return shard, claimed(request)
        if refusal := self.refusal(request):
            shard = struck_out(shard, index) if refusal == "missing" else shard
            return with_rank(shard, index, 0), (refusal, False)
        shard, end = self.agreed(shard, index)
        if end:
            shard, state = self.settled_again(shard, index, end, epoch=request.epoch)
            return with_rank(shard, index, 0), (state if state in SAID else "finished", False)
        request = shard.requests[index]
        reason = self.ending_due(shard, index, request.attempts)
        if not reason and shard.waits[index] == "over":
            reason = "queue_timeout"
        if reason:
            shard, state = self.end_for(shard, index, reason)
            shard = with_rank(shard, index, 0)
            return shard, ("attempts_spent" if state == "failed" else state, True)
        if is_parked(shard, index):
            return with_rank(shard, index, 0), ("earlier_turn", False)
        if shard.is_paused:
            return shard, ("paused", False)
        shard = changed(
            entered(shard, index, "running"),
            index,
            epoch=request.epoch + 1,
            owner=call.owner,
            attempts=request.attempts + 1,
            resumes=request.resumes + (request.published > 0),
            resumed_from=request.published,
        )
        shard, _ = self.without_surplus(with_lease(shard, index, "live"), MAX_CONSUMED)
        return shard, claimed(shard.requests[index])

    def refusal(self, request: Request | tuple[()]) -> str:
        """Why a request that this owner does not run already cannot be claimed at all."""
        if not request:
            return "missing"
        if request.state == "queued":
            return ""
        return request.state if request.state in SAID else "finished"

    def commit(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies (status, tokens in the log, cancel)."""
        request = shard.requests[call.request]
        if not request:
            return shard, ("fenced", 0, False)
        if not self.holds(request, call):
            status = ("replayed", request.published) if is_named(request, call) else ("fenced", 0)
            return shard, (*status, request.cancel)
        shard, end = self.agreed(shard, call.request)
        request = shard.requests[call.request]
        published, cancel = request.published, request.cancel
        if end:
            shard = with_lease(shard, call.request, "")
            shard, _ = self.settled_again(shard, call.request, end, epoch=call.epoch)
            status = ("replayed", published) if end.epoch == call.epoch else ("fenced", 0)
            return shard, (*status, cancel)
        is_replay = call.start < published
        ends_here = call.done and call.start + len(call.tokens) == published
        if call.start > published:
            return shard, ("rewind", published, cancel)
        if is_replay and not ends_here:
            return shard, ("replayed", published, cancel)
        if call.tokens and not is_replay:
            chunk = Chunk(call.start, call.tokens, call.epoch)
            published += len(call.tokens)
            shard = changed(shard, call.request, published=published, log=(*request.log, chunk))
        if call.done:
            shard = with_lease(shard, call.request, "")
            shard, _ = self.write_end(shard, call.request, call.done, epoch=call.epoch)
        return shard, ("ok", published, cancel)

    def heartbeat(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies (held, cancel)."""
        request = shard.requests[call.request]
        if not request:
            return shard, (False, False)
        held = self.holds(request, call)
        if held:
            shard = with_lease(shard, call.request, "live")
        return shard, (held, request.cancel)

    def release(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies whether this call or an earlier one gave the claim back."""
        request = shard.requests[call.request]
        if not request:
            return shard, False
        if not self.holds(request, call):
            return shard, request.released == call.owner
        shard, _ = self.agreed(changed(shard, call.request, released=call.owner), call.request)
        shard, _ = self.put_back(shard, call.request, request.attempts - 1, is_kept=True)
        return shard, True

    def fail(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies the state after it when this claim has failed, now or earlier, else ""."""
        index, request = call.request, shard.requests[call.request]
        if not request:
            return shard, ""
        if not self.holds(request, call):
            is_mine = request.released == call.owner or is_named(request, call)
            return shard, request.state if is_mine else ""
        if call.flag:
            shard, _ = self.agreed(shard, index)
            request = shard.requests[index]
        attempts = self.attempts_of(request)
        ending = self.ending_due(shard, index, attempts) if call.flag else ""
        if not call.flag or ending == "attempts_spent":
            if ending:
                shard = with_letter(shard, index, "worker_error")
            shard = with_lease(shard, index, "")
            return self.write_end(shard, index, "worker_error", epoch=call.epoch)
        shard = changed(shard, index, released=call.owner)
        if ending:
            return self.end_for(shard, index, ending)
        shard = changed(shard, index, owner=NOBODY, epoch=request.epoch + 1, attempts=attempts)
        shard = with_delay(with_lease(shard, index, ""), index, "live")
        return waiting_anew(entered(shard, index, "scheduled"), index), "scheduled"

    def dead_letter(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies whether this claim has ended the request, now or earlier."""
        request = shard.requests[call.request]
        if not request:
            return shard, False
        if not self.holds(request, call):
            return shard, is_named(request, call)
        shard = with_lease(with_letter(shard, call.request, "undecodable"), call.request, "")
        shard, _ = self.write_end(shard, call.request, "undecodable", epoch=call.epoch)
        return shard, True

    # What any worker or operator calls.

    def reap(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies the state after it, "" when there was nothing to do."""
        index, request = call.request, shard.requests[call.request]
        if shard.leases[index] != "over":
            return shard, ""
        if not request or request.state != "running":
            shard = with_lease(shard, index, "")
            return shard if request else struck_out(shard, index), ""
        shard, _ = self.agreed(shard, index)
        request = shard.requests[index]
        attempts = self.attempts_of(request)
        shard = changed(shard, index, losses=self.losses_of(request))
        is_kept = self.keeps_arrival(shard.requests[index])
        return self.put_back(shard, index, attempts, is_kept=is_kept)

    def promote(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies the state after it, "" when there was nothing to do."""
        index, request = call.request, shard.requests[call.request]
        if shard.delays[index] != "over":
            return shard, ""
        shard = with_delay(shard, index, "")
        if not request:
            return struck_out(shard, index), ""
        if request.state != "scheduled":
            return shard, ""
        if reason := self.ending_due(shard, index, request.attempts):
            return self.end_for(shard, index, reason)
        return self.enqueue(shard, index, is_kept=self.keeps_arrival(request))

    def expire(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies the state after it, "" when there was nothing to do."""
        index, request = call.request, shard.requests[call.request]
        is_late = index in shard.clock.late
        has_waited = bool(shard.waits[index]) and (shard.waits[index] == "over" or is_late)
        if has_waited and not (request and request.state in WAITING):
            shard = with_wait(shard, index, "")
            shard = shard if request else struck_out(shard, index)
        reason = ""
        if request and request.state in WAITING and has_waited:
            reason = "deadline_exceeded" if is_late else "queue_timeout"
        elif request and request.state == "running" and shard.leases[index] == "over":
            reason = "cancelled" if request.cancel else "deadline_exceeded" if is_late else ""
        if not reason:
            return shard, ""
        return self.end_for(with_delay(shard, index, ""), index, reason)

    def restore(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies what the request had lost, "" for nothing."""
        index, request = call.request, shard.requests[call.request]
        if not request:
            return struck_out(shard, index), "record" if shard.books.open[index] else ""
        state, lost = request.state, ""
        if request.turn and state in OPEN and not is_turn(shard, index):
            turns = (*without_turn(shard, index).turns, Turn(request.turn, index))
            shard, lost = shard._replace(turns=tuple(sorted(turns))), "entry"
        if state == "queued":
            was_ranked, shard = shard.ranks[index], self.ranked_again(shard, index)
            if not is_parked(shard, index):
                lost = lost if was_ranked else "entry"
                shard = with_rank(shard, index, request.arrival)
        elif state == "scheduled" and not shard.delays[index]:
            shard, lost = with_delay(shard, index, "live"), "delay"
        elif state == "running" and not shard.leases[index]:
            shard, lost = with_lease(shard, index, "live"), "lease"
        if state in WAITING and not shard.waits[index]:
            shard, lost = waiting_anew(shard, index), lost or "wait"
        return shard, lost

    def requeue(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies the state after it, "superseded" when the letter is of an earlier request.

        "" when there is neither letter nor request.
        """
        index, request = call.request, shard.requests[call.request]
        here = [lt for lt in shard.letters if (lt.letter_id, lt.request) == (call.entry, index)]
        if here and here[0].is_old:
            return shard, "superseded"
        if not here or (request and request.state != "failed"):
            return shard, request.state if request else ""
        before = request or Request()
        log: tuple[Chunk | End, ...] = ()
        if request and call.flag:
            log = request.log[:-1] if isinstance(request.log[-1], End) else request.log
        again = Request(
            epoch=before.epoch + 1,
            published=before.published if log else 0,
            resumes=before.resumes if request and call.flag else 0,
            arrival=before.arrival,
            log=log,
        )
        shard = booked(with_request(shard, index, again), index, "failed", "queued")
        shard = shard._replace(letters=tuple(lt for lt in shard.letters if lt not in here))
        shard = with_old_ends(with_old_letters(shard, index), index)
        if index in self.in_session:
            shard = with_turn(shard, index)
        number = shard.requests[index].turn
        return self.enqueue(shard, index, is_kept=again.published > 0, number=number)

    def pause(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        return shard._replace(is_paused=True), None

    def resume(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        return shard._replace(is_paused=False), None

    # What happens besides the scripts.

    def peek(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """A worker looks for requests to claim. Replies which there are, in no order."""
        if shard.is_paused:
            return shard, ()
        return shard, tuple(index for index, rank in enumerate(shard.ranks) if rank)

    def balance(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies how many tickets were used up."""
        return self.without_surplus(shard, MAX_BALANCED)


def claimed(request: Request) -> tuple[Any, ...]:
    trial = trial_of(request)
    about = request.epoch, request.attempts, request.cancel, request.tokens
    return "claimed", *about, trial, request.arrival
