"""The transitions of a request as pure functions, decision by decision as the scripts make them.

Knows no Redis, no clock and no randomness: owners are arguments, and time passes by operations of
its own. `test_model_matches_scripts.py` holds this file and the scripts together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.simulation.model_state import (
    MISSING,
    NOBODY,
    STATE_OF,
    WAITING,
    Chunk,
    End,
    Request,
    Shard,
    booked,
    changed,
    entered,
    put,
    struck_out,
    with_delay,
    with_entry,
    with_lease,
    with_letter,
    with_request,
    without_entry,
)


class Call(NamedTuple):
    """One operation: a script with its arguments, or what else happens to a shard.

    `entry`: the id of an ingress entry or of a dead letter. `done`: a reason of STATE_OF that a
    worker writes, "" for none. `holder`: the argument of SUBMIT of that name, -1 for none. `flag`:
    for SUBMIT that it is for later, for FAIL that it may be tried again, for REQUEUE that the
    tokens are kept.
    """

    name: str
    request: int = 0
    entry: int = 0
    epoch: int = 0
    owner: int = NOBODY
    start: int = 0
    tokens: tuple[int, ...] = ()
    done: str = ""
    holder: int = -1
    flag: bool = False


class Scripts:
    """The scripts, with the settings they depend on. Each returns the shard after it and a reply.

    `keyed`: the requests that carry one and the same idempotency key.
    """

    def __init__(
        self, *, max_attempts: int = 2, max_backlog: int = 0, keyed: frozenset[int] = frozenset()
    ) -> None:
        self.max_attempts = max_attempts
        self.max_backlog = max_backlog
        self.keyed = keyed

    def run(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        return getattr(self, call.name)(shard, call)

    # What a producer calls.

    def submit(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies (outcome, request, state) with outcome created, known, full or held."""
        index, holder = call.request, shard.key_holder
        if known := shard.requests[index]:
            return shard, ("known", index, known.state)
        if index in self.keyed and holder not in (-1, index):
            if holder != call.holder:
                return shard, ("held", holder, "")
            if known := shard.requests[holder]:
                return shard, ("known", holder, known.state)
        shard = struck_out(shard, index)
        waiting = len(shard.ingress) + sum(bool(delay) for delay in shard.delays)
        if 0 < self.max_backlog <= waiting:
            return shard, ("full", index, "requests")
        if index in self.keyed:
            shard = shard._replace(key_holder=index)
        state = "scheduled" if call.flag else "queued"
        shard = booked(with_request(shard, index, Request(state)), index, "", state)
        if call.flag:
            return with_delay(shard, index, "live"), ("created", index, state)
        return with_entry(shard, index), ("created", index, state)

    def cancel(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies the state after it, "" for an unknown request."""
        request = shard.requests[call.request]
        if not request:
            return shard, ""
        if request.state in WAITING:
            shard = with_delay(shard, call.request, "")
            return self.end_without_worker(shard, call.request, "cancelled"), "cancelled"
        if request.state == "running":
            shard = changed(shard, call.request, cancel=True)
        return shard, request.state

    # What a worker calls.

    def claim(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies ("claimed", epoch, attempts, cancel, tokens) or (reason, whether it ended)."""
        index, request = call.request, shard.requests[call.request]
        if request and request.state == "running" and request.owner == call.owner:
            return shard, claimed(request)
        dropped = without_entry(shard, call.entry)
        if refusal := self.refusal(request):
            shard = struck_out(dropped, index) if refusal == "missing" else dropped
            return shard, (refusal, False)
        reason = self.ending_due(shard, index, request.attempts)
        if not reason and request.is_queue_time_over:
            reason = "queue_timeout"
        if reason:
            state = STATE_OF[reason]
            shard = self.end_for(dropped, index, reason)
            return shard, ("attempts_spent" if state == "failed" else state, True)
        if shard.is_paused:
            was_there = dropped.ingress != shard.ingress
            return with_entry(dropped, index) if was_there else dropped, ("paused", False)
        shard = changed(
            entered(dropped, index, "running"),
            index,
            epoch=request.epoch + 1,
            owner=call.owner,
            attempts=request.attempts + 1,
            resumes=request.resumes + (request.published > 0),
        )
        return with_lease(shard, index, "live"), claimed(shard.requests[index])

    def refusal(self, request: Request | tuple[()]) -> str:
        """Why a request that this owner does not run already cannot be claimed at all."""
        if not request:
            return "missing"
        if request.state in ("running", "scheduled", "cancelled", "expired"):
            return request.state
        if request.state != "queued":
            return "finished"
        return "" if request.has_body else "missing"

    def commit(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies (status, tokens in the log, cancel)."""
        request = shard.requests[call.request]
        if not request:
            return shard, ("fenced", 0, False)
        if not self.holds(request, call):
            status = ("replayed", request.published) if is_named(request, call) else ("fenced", 0)
            return shard, (*status, request.cancel)
        published, cancel = request.published, request.cancel
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
            shard = self.write_end(shard, call.request, call.done, epoch=call.epoch)
        else:
            shard = with_lease(shard, call.request, "live")
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
        shard = changed(shard, call.request, released=call.owner)
        return self.put_back(shard, call.request, request.attempts - 1), True

    def fail(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies the state after it when this claim has failed, now or earlier, else ""."""
        index, request = call.request, shard.requests[call.request]
        if not request:
            return shard, ""
        if not self.holds(request, call):
            is_mine = request.released == call.owner or is_named(request, call)
            return shard, request.state if is_mine else ""
        ending = self.ending_due(shard, index, request.attempts) if call.flag else ""
        if not call.flag or ending == "attempts_spent":
            if ending:
                shard = with_letter(shard, index, "worker_error")
            shard = with_lease(shard, index, "")
            return self.write_end(shard, index, "worker_error", epoch=call.epoch), "failed"
        shard = changed(shard, index, released=call.owner)
        if ending:
            return self.end_for(shard, index, ending), STATE_OF[ending]
        shard = changed(shard, index, owner=NOBODY, epoch=request.epoch + 1)
        shard = with_delay(with_lease(shard, index, ""), index, "live")
        return entered(shard, index, "scheduled"), "scheduled"

    def dead_letter(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies whether this claim has ended the request, now or earlier."""
        request = shard.requests[call.request]
        if not request:
            return shard, False
        if not self.holds(request, call):
            return shard, is_named(request, call)
        shard = with_lease(with_letter(shard, call.request, "undecodable"), call.request, "")
        return self.write_end(shard, call.request, "undecodable", epoch=call.epoch), True

    # What any worker or operator calls.

    def reap(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies the state after it, "" when there was nothing to do."""
        index, request = call.request, shard.requests[call.request]
        if shard.leases[index] != "over":
            return shard, ""
        if not request or request.state != "running":
            shard = with_lease(shard, index, "")
            return shard if request else struck_out(shard, index), ""
        shard = self.put_back(shard, index, request.attempts)
        return shard, shard.requests[index].state

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
            return self.end_for(shard, index, reason), STATE_OF[reason]
        return self.enqueue(shard, index), "queued"

    def requeue(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """Replies the state after it, "" when there is neither letter nor request."""
        index, request = call.request, shard.requests[call.request]
        here = [lt for lt in shard.letters if (lt.letter_id, lt.request) == (call.entry, index)]
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
            log=log,
        )
        shard = booked(with_request(shard, index, again), index, "failed", "queued")
        shard = shard._replace(letters=tuple(lt for lt in shard.letters if lt not in here))
        return self.enqueue(shard, index), "queued"

    def pause(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        return shard._replace(is_paused=True), None

    def resume(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        return shard._replace(is_paused=False), None

    # What happens besides the scripts.

    def deliver(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """A worker reads the oldest entry nobody has read. Replies its id and request, or ()."""
        for place, entry in enumerate(shard.ingress):
            if not entry.is_delivered and not shard.is_paused:
                read = entry._replace(is_delivered=True)
                shard = shard._replace(ingress=put(shard.ingress, place, read))
                return shard, (entry.entry_id, entry.request)
        return shard, ()

    def recover(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """A worker takes what is pending, for itself or anyone. Replies ids and requests."""
        return shard, tuple((e.entry_id, e.request) for e in shard.ingress if e.is_delivered)

    def expire_lease(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        over = "over" if shard.leases[call.request] else ""
        return with_lease(shard, call.request, over), None

    def pass_delay(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        over = "over" if shard.delays[call.request] else ""
        return with_delay(shard, call.request, over), None

    def pass_queue_time(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        if shard.requests[call.request]:
            shard = changed(shard, call.request, is_queue_time_over=True)
        return shard, None

    def pass_deadline(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        late = tuple(sorted({*shard.clock.late, call.request}))
        return shard._replace(clock=shard.clock._replace(late=late)), None

    def forget(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """The keys of a request expire; its lease, due time and place in the books do not."""
        return with_request(shard, call.request, MISSING), None

    # What the scripts share.

    def holds(self, request: Request, call: Call) -> bool:
        """THE fence."""
        return request.state == "running" and is_named(request, call)

    def ending_due(self, shard: Shard, index: int, attempts: int) -> str:
        if shard.requests[index].cancel:
            return "cancelled"
        if index in shard.clock.late:
            return "deadline_exceeded"
        return "attempts_spent" if attempts >= self.max_attempts else ""

    def end_for(self, shard: Shard, index: int, reason: str) -> Shard:
        if reason == "attempts_spent":
            shard = with_letter(shard, index, reason)
        return self.end_without_worker(with_lease(shard, index, ""), index, reason)

    def end_without_worker(self, shard: Shard, index: int, reason: str) -> Shard:
        epoch = shard.requests[index].epoch + 1
        return self.write_end(changed(shard, index, owner=NOBODY), index, reason, epoch=epoch)

    def write_end(self, shard: Shard, index: int, reason: str, *, epoch: int) -> Shard:
        request = shard.requests[index]
        end = End(request.published, epoch, reason, request.attempts, request.resumes)
        shard = changed(shard, index, epoch=epoch, has_body=False, log=(*request.log, end))
        return entered(shard, index, STATE_OF[reason])

    def enqueue(self, shard: Shard, index: int) -> Shard:
        shard = changed(shard, index, is_queue_time_over=False)
        return with_entry(entered(shard, index, "queued"), index)

    def put_back(self, shard: Shard, index: int, attempts: int) -> Shard:
        if reason := self.ending_due(shard, index, attempts):
            return self.end_for(shard, index, reason)
        epoch = shard.requests[index].epoch + 1
        shard = changed(shard, index, owner=NOBODY, attempts=attempts, epoch=epoch)
        return self.enqueue(with_lease(shard, index, ""), index)


def is_named(request: Request, call: Call) -> bool:
    """Whether the record names this claim, be it running or ended by it."""
    return request.epoch == call.epoch and request.owner == call.owner


def claimed(request: Request) -> tuple[Any, ...]:
    return "claimed", request.epoch, request.attempts, request.cancel, request.tokens
