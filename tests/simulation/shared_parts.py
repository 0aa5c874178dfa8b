"""What the transitions of the model share: the fence, the attempts, the ends, the way back.

The counterpart of request.lua and running.lua.
"""

from __future__ import annotations

from tests.simulation.model_state import (
    NOBODY,
    STATE_OF,
    Call,
    Chunk,
    End,
    Request,
    Shard,
    changed,
    entered,
    is_parked,
    lined_up,
    num_ranked,
    told_of,
    waiting_anew,
    with_lease,
    with_letter,
    with_new_arrival,
    with_rank,
    with_ticket,
    with_told,
)

#: A claim that published so many tokens has acquitted its request, whatever became of its worker.
ACQUITTED = 64
#: So many losses of workers in a row make a suspect of a request that publishes tokens.
SUSPICIOUS = 2


class SharedParts:
    """`max_attempts`: claims that may publish nothing until a request is given up."""

    max_attempts: int

    def holds(self, request: Request, call: Call) -> bool:
        """THE fence."""
        return request.state == "running" and is_named(request, call)

    def ending_due(self, shard: Shard, index: int, attempts: int) -> str:
        if shard.requests[index].cancel:
            return "cancelled"
        if index in shard.clock.late:
            return "deadline_exceeded"
        return "attempts_spent" if attempts >= self.max_attempts else ""

    def attempts_of(self, request: Request) -> int:
        return request.attempts - (request.published > request.resumed_from)

    def losses_of(self, request: Request) -> int:
        has_got_on = request.published - request.resumed_from >= ACQUITTED
        return 0 if has_got_on else request.losses + 1

    def keeps_arrival(self, request: Request) -> bool:
        """Whether it comes before later ones when it comes back."""
        return request.published > 0 and request.losses < SUSPICIOUS

    def ranked_again(self, shard: Shard, index: int) -> Shard:
        """A queued request that is in no rank set is put back, with a ticket if one is missing."""
        if is_parked(shard, index):
            shard = with_rank(shard, index, 0)
        elif not shard.ranks[index]:
            shard = with_rank(shard, index, shard.requests[index].arrival)
        if len(shard.tickets) < num_ranked(shard):
            shard = with_ticket(shard, index)
        return shard

    def without_surplus(self, shard: Shard, most: int) -> tuple[Shard, int]:
        """The oldest tickets are used up; returns how many, too."""
        count = max(0, min(most, len(shard.tickets) - num_ranked(shard)))
        return shard._replace(tickets=shard.tickets[count:]), count

    # Those that end something return the state after it, too.

    def end_for(self, shard: Shard, index: int, reason: str) -> tuple[Shard, str]:
        if reason == "attempts_spent":
            shard = with_letter(shard, index, reason)
        return self.ended_without_worker(with_lease(shard, index, ""), index, reason)

    def ended_without_worker(self, shard: Shard, index: int, reason: str) -> tuple[Shard, str]:
        epoch = shard.requests[index].epoch + 1
        return self.write_end(changed(shard, index, owner=NOBODY), index, reason, epoch=epoch)

    def agreed(self, shard: Shard, index: int) -> tuple[Shard, End | None]:
        """The record says of the log what there is. Returns the end if it is there, too."""
        request = shard.requests[index]
        newest = request.log[-1] if request.log else Chunk(0, (), 0)
        if isinstance(newest, End):
            return changed(shard, index, published=newest.at), newest
        return changed(shard, index, published=newest.end), None

    def write_end(self, shard: Shard, index: int, reason: str, *, epoch: int) -> tuple[Shard, str]:
        shard, end = self.agreed(shard, index)
        if end:
            return self.settled_again(shard, index, end, epoch=epoch)
        request = shard.requests[index]
        end = End(request.published, epoch, reason, request.attempts, request.resumes)
        shard = changed(shard, index, log=(*request.log, end))
        shard = self.told(shard, index, end)
        return self.settled(shard, index, end.reason, epoch=epoch)

    def told(self, shard: Shard, index: int, end: End) -> Shard:
        return with_told(shard, index, end)

    def settled_again(self, shard: Shard, index: int, end: End, *, epoch: int) -> tuple[Shard, str]:
        """The record says that the log has its end, which a torn file told or not."""
        if not told_of(shard, index):
            shard = self.told(shard, index, end)
        return self.settled(shard, index, end.reason, epoch=epoch)

    def settled(self, shard: Shard, index: int, reason: str, *, epoch: int) -> tuple[Shard, str]:
        shard = changed(shard, index, epoch=epoch, has_body=False)
        return entered(shard, index, STATE_OF[reason]), STATE_OF[reason]

    def enqueue(
        self, shard: Shard, index: int, *, is_kept: bool, number: int = 0
    ) -> tuple[Shard, str]:
        shard = waiting_anew(entered(shard, index, "queued"), index)
        if not is_kept:
            shard = with_new_arrival(shard, index, number=number)
        return lined_up(shard, index), "queued"

    def put_back(
        self, shard: Shard, index: int, attempts: int, *, is_kept: bool
    ) -> tuple[Shard, str]:
        if reason := self.ending_due(shard, index, attempts):
            return self.end_for(shard, index, reason)
        epoch = shard.requests[index].epoch + 1
        shard = changed(shard, index, owner=NOBODY, attempts=attempts, epoch=epoch)
        return self.enqueue(with_lease(shard, index, ""), index, is_kept=is_kept)


def trial_of(request: Request) -> int:
    """How many tokens a claimed request should publish before others begin beside it."""
    return ACQUITTED if request.losses >= SUSPICIOUS else int(request.attempts > 1)


def is_named(request: Request, call: Call) -> bool:
    """Whether the record names this claim, be it running or ended by it."""
    return request.epoch == call.epoch and request.owner == call.owner
