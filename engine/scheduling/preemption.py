"""Preemption: who gives way when slots or blocks run out, and what becomes of the victim's KV.

Knows no queue, no plan and no time: the Scheduler asks it for victims and sends them back to wait.

A waiting request takes only from requests of strictly lower classes that stand worse, leaves each
class its minimum of slots (see shares), and takes only if that is enough. It does not matter for
how long they have run: age counts for those that wait. A decode that lacks a block takes it from
the one that stands worst, its own class included. Nobody gives way twice without a token in
between: two requests would take turns and never get on.
"""

from collections.abc import Container, Sequence

from engine.batch import BlockCopy
from engine.cache.kv_cache import KVCache
from engine.config import EngineConfig
from engine.request import Request
from engine.scheduling.preemption_cost import PreemptionCost
from engine.scheduling.running_set import RunningSet
from engine.scheduling.shares import ClassShares
from engine.stats import SchedulerStats


class Preemption:
    """Chooses victims among the running requests, and empties their blocks; moves nobody itself."""

    def __init__(
        self,
        config: EngineConfig,
        running: RunningSet,
        kv_cache: KVCache,
        stats: SchedulerStats,
        *,
        shares: ClassShares,
    ) -> None:
        self._shares = shares
        self._config = config
        self._running = running
        self._kv_cache = kv_cache
        self._stats = stats
        self.cost = PreemptionCost(
            config.block_copy_seconds, state_copy_seconds=config.state_copy_seconds
        )
        self._watermark_blocks = int(config.watermark * config.num_blocks)

    def victims_for(
        self, waiting: Request, *, planned: Container[str] = (), least: int = 0
    ) -> Sequence[Request] | None:
        """Whom to preempt to admit a request; nobody if there is room, None if it must wait.

        There is room where a slot is free, one for a recurrent state too, and blocks for all its
        known tokens. Those `planned` in
        this step came before it and stay. `least` is the smallest number of victims: where it is
        1, free room alone does not do.
        """
        if not least and self._num_victims(waiting, ()) == 0:
            return ()
        if not self._running.has_class_below(waiting.priority):
            return None
        worse = [
            request
            for request in self._running.requests.values()
            if request.priority < waiting.priority
            and request.standing > waiting.standing
            and request.request_id not in planned
            and may_give_way(request)
        ]
        worse.sort(key=lambda request: request.order, reverse=True)
        worse = self._shares.without_minimum(worse)
        num_victims = self._num_victims(waiting, worse)
        if num_victims is None or len(worse) < least:
            return None
        return worse[: max(least, num_victims)]

    def victim_beside(self, request: Request) -> Request:
        """Whom to preempt first when a decode lacks a block: itself if it stands worst."""
        running = self._running.requests.values()
        return max(
            (other for other in running if other is request or may_give_way(other)),
            key=lambda candidate: candidate.order,
        )

    def vacate(self, victim: Request) -> list[BlockCopy]:
        """Empty the blocks of a victim: swap its KV out, or drop it, to be computed again.

        Returns the copies that the runner must make first.
        """
        victim.num_preemptions += 1
        if self._should_swap(victim):
            self._stats.preemptions_swap += 1
            victim.num_swaps += 1
            return self._kv_cache.swap_out(victim)
        self._stats.preemptions_recompute += 1
        self._stats.preempted_tokens += victim.num_computed_tokens
        self._kv_cache.release(victim)
        victim.num_computed_tokens = 0
        return []

    def _num_victims(self, request: Request, others: Sequence[Request]) -> int | None:
        """How many of `others`, in order, to preempt to make room; None if all are too few."""
        most, num_running = self._running.max_requests, len(self._running)
        if num_running - len(others) >= most:
            return None
        ids = [other.request_id for other in others]
        for num_gone, lacking in enumerate(self._kv_cache.lacking_blocks(request, without=ids)):
            num_left = num_running - num_gone
            # Alone, a request may fill the pool; otherwise the running ones need room to grow.
            spare_blocks = self._watermark_blocks if num_left else 0
            has_slots = num_left < most and self._kv_cache.states.has_room(num_gone=num_gone)
            if has_slots and lacking + spare_blocks <= 0:
                return num_gone
        return None

    def _should_swap(self, victim: Request) -> bool:
        """Whether to swap or to recompute; "auto" takes what costs less time."""
        mode, cache = self._config.preemption_mode, self._kv_cache
        if mode == "recompute" or not cache.can_swap_out(victim):
            return False
        return mode == "swap" or self.cost.prefers_swap(
            num_blocks=cache.blocks_for(victim.num_computed_tokens),
            num_dropped_tokens=cache.num_dropped_tokens(victim),
        )


def may_give_way(request: Request) -> bool:
    """Whether a request, if it was preempted before, has grown since it was admitted again."""
    return request.num_preemptions == 0 or request.progressed_since_admission
