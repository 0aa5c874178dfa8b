"""What happens to a shard besides the scripts: time passes, and the server loses parts of it.

Mixed into the scripts of the model, so that each is an operation as they are.
"""

from __future__ import annotations

from typing import Any

from tests.simulation.model_state import (
    COMMITTED,
    MISSING,
    OTHER_RANK,
    Call,
    Shard,
    changed,
    with_delay,
    with_late_waits,
    with_lease,
    with_moments_kept,
    with_old_ends,
    with_old_letters,
    with_rank,
    with_request,
    with_told,
    with_wait,
    without_turn,
)


class Accidents:
    """Operations that no script makes. Each returns the shard after it and no reply."""

    def expire_lease(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        over = "over" if shard.leases[call.request] else ""
        return with_lease(shard, call.request, over), None

    def pass_delay(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        over = "over" if shard.delays[call.request] else ""
        return with_delay(shard, call.request, over), None

    def pass_queue_time(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        over = "over" if shard.waits[call.request] else ""
        return with_wait(shard, call.request, over), None

    def pass_deadline(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        late = tuple(sorted({*shard.clock.late, call.request}))
        return with_late_waits(shard._replace(clock=shard.clock._replace(late=late))), None

    def lose_rank(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """As when it is evicted."""
        return with_rank(shard, call.request, 0), None

    def stay_ranked(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """As when a rank is written by hand, of a request that runs."""
        return with_rank(shard, call.request, shard.requests[call.request].arrival), None

    def misrank(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """As when it was ranked by another policy."""
        return with_rank(shard, call.request, OTHER_RANK), None

    def lose_ticket(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        tickets = shard.tickets[: call.entry] + shard.tickets[call.entry + 1 :]
        return shard._replace(tickets=tickets), None

    def lose_turn(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        return without_turn(shard, call.request, keeps_place=call.flag), None

    def lose_delay(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        return with_delay(shard, call.request, ""), None

    def lose_lease(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        return with_lease(shard, call.request, ""), None

    def lose_wait(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        return with_wait(shard, call.request, ""), None

    def forget(self, shard: Shard, call: Call) -> tuple[Shard, Any]:
        """The keys of a request expire; its lease, its times and its place in the books do not."""
        shard = with_old_letters(shard, call.request, is_old=False)
        shard = with_old_ends(shard, call.request, is_old=False)
        shard = with_moments_kept(shard, call.request)
        return with_request(shard, call.request, MISSING), None


def torn(disk: Shard, shard: Shard, index: int, *, has_end: bool, is_told: bool) -> Shard | None:
    """What a torn file leaves of the commits of one claim: their entries, and no more; or None.

    `has_end`: whether the end is among the entries, if there was one. `is_told`: whether the end,
    which is among them, was told as well.
    """
    before, after = disk.requests[index], shard.requests[index]
    if not before or not after or before.state != "running" or before.owner != after.owner:
        return None
    end, log = after.end, after.log
    if end and end.reason not in COMMITTED:
        return None
    if end and not has_end and end not in before.log:
        log, end = tuple(entry for entry in log if entry != end), None
    if log == before.log or after.tokens[: len(before.tokens)] != before.tokens:
        return None
    disk = changed(disk, index, log=log)
    if not is_told:
        return disk
    return with_told(disk, index, end) if end and end not in before.log else None
