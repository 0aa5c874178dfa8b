"""Who gives way to whom, and what becomes of its KV; plans with preemptions: test_scheduler."""

import pytest

from engine.batch import BlockCopy
from engine.cache.kv_cache import KVCache
from engine.request import Priority, Request
from engine.scheduling.policy import POLICIES
from engine.scheduling.preemption import Preemption, may_give_way
from engine.scheduling.running_set import RunningSet
from engine.scheduling.shares import ClassShares
from engine.stats import SchedulerStats
from tests.engine.builders import make_config, make_request

LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH


class Room:
    """Requests that run with all their tokens computed but the last; the later, the worse ranked.

    A request of `prompt` tokens holds `prompt / 4` blocks, rounded up.
    """

    def __init__(self, *requests: Request, **config) -> None:
        self.config = make_config(**config)
        self.running = RunningSet(self.config)
        self.cache = KVCache(
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            num_host_blocks=self.config.num_host_blocks,
        )
        self.stats = SchedulerStats()
        for place, request in enumerate(requests):
            self._give_rank(request, (float(place), place))
            self.cache.admit(request)
            self.cache.grow(request.request_id, request.num_tokens)
            request.num_computed_tokens = request.num_tokens - 1
            self.running.join(request)
        self.preemption = Preemption(
            self.config, self.running, self.cache, self.stats,
            shares=ClassShares(self.config, self.running),
        )  # fmt: skip

    def victims_for(
        self, request: Request, *, rank: float = -1.0, least: int = 0
    ) -> list[str] | None:
        self._give_rank(request, (rank, 99))
        victims = self.preemption.victims_for(request, least=least)
        return None if victims is None else [victim.request_id for victim in victims]

    def _give_rank(self, request: Request, rank: tuple[float, int]) -> None:
        request.standing = POLICIES[self.config.policy](request, self.config)
        request.rank = rank


def low(name: str, **others) -> Request:
    return make_request(name, **({"priority": LOW} | others))


def high(**others) -> Request:
    return make_request("waiting", **({"priority": HIGH} | others))


def test_nobody_gives_way_while_there_is_a_slot_and_room_for_all_known_tokens():
    room = Room(low("a", prompt=8), max_num_seqs=2, num_blocks=4)
    assert room.victims_for(high(prompt=8)) == []


def test_for_a_slot_the_worst_rank_gives_way():
    room = Room(low("a"), low("b"), low("c"), max_num_seqs=3)
    assert room.victims_for(high()) == ["c"]


def test_for_blocks_as_many_give_way_as_it_takes_the_worst_first():
    room = Room(low("a", prompt=8), low("b", prompt=8), low("c", prompt=8), num_blocks=7)
    assert room.victims_for(high(prompt=4)) == []
    assert room.victims_for(high(prompt=12)) == ["c"]
    assert room.victims_for(high(prompt=20)) == ["c", "b"]


def test_it_waits_where_all_that_may_give_way_would_not_be_enough():
    room = Room(make_request("a", prompt=8, priority=HIGH), low("b", prompt=8), num_blocks=4)
    assert room.victims_for(high(prompt=12)) is None


@pytest.mark.parametrize(
    ("priority", "rank", "victims"),
    [(NORMAL, -1.0, None), (HIGH, -1.0, ["a"]), (HIGH, 1.0, ["a"])],
    ids=["the same class", "a better class", "a better class of a worse rank"],
)
def test_only_a_better_class_is_given_way_to_whatever_the_ranks(priority, rank, victims):
    room = Room(make_request("a", priority=NORMAL), max_num_seqs=1)
    assert room.victims_for(make_request("waiting", priority=priority), rank=rank) == victims


@pytest.mark.parametrize(
    ("policy", "prompt", "victims"),
    [("fcfs", 1, None), ("sjf", 1, ["a"]), ("sjf", 9, None), ("adaptive", 9, ["a"])],
)
def test_a_better_class_is_given_way_to_where_the_policy_lets_it_stand_better(
    policy, prompt, victims
):
    room = Room(make_request("a", prompt=5), max_num_seqs=1, policy=policy)
    assert room.victims_for(high(prompt=prompt), rank=1.0) == victims


def test_the_lowest_class_gives_way_first_and_of_it_the_worst_rank():
    others = [low("a"), low("b"), make_request("c"), make_request("d", priority=HIGH)]
    room = Room(*others, max_num_seqs=4)
    assert room.victims_for(high()) == ["b"]


def test_one_that_overtakes_takes_the_place_of_another_even_if_there_is_room():
    room = Room(low("a"), low("b"), make_request("c", priority=HIGH))
    assert room.victims_for(high(), least=1) == ["b"]
    assert Room(make_request("c", priority=HIGH)).victims_for(high(), least=1) is None


def test_one_that_was_preempted_gives_way_again_only_when_it_has_grown():
    request = low("a")
    assert may_give_way(request)
    request.num_preemptions, request.num_tokens_at_admission = 1, request.num_tokens
    assert not may_give_way(request)
    assert Room(request, max_num_seqs=1).victims_for(high()) is None
    request.expect_token()
    assert may_give_way(request)


@pytest.mark.parametrize(("num_blocks", "victims"), [(9, ["a"]), (10, [])])
def test_beside_others_a_request_leaves_the_watermark_free(num_blocks, victims):
    room = Room(low("a", prompt=8), num_blocks=num_blocks, watermark=0.25)
    assert room.victims_for(high(prompt=24)) == victims


def test_alone_a_request_may_fill_the_pool():
    assert Room(num_blocks=10, watermark=0.25).victims_for(high(prompt=40)) == []


def test_a_decode_gets_a_block_from_the_worst_rank_of_the_lowest_class():
    a, b, c = low("a"), make_request("b", priority=HIGH), make_request("c", priority=HIGH)
    assert Room(a, b, c).preemption.victim_beside(b) is a
    assert Room(a, b, c).preemption.victim_beside(a) is a
    assert Room(b, c).preemption.victim_beside(b) is c


def test_a_decode_of_the_worst_rank_gives_way_itself_even_if_it_has_not_grown():
    a, b = low("a"), low("b")
    b.num_preemptions, b.num_tokens_at_admission = 1, b.num_tokens
    room = Room(a, b)
    assert room.preemption.victim_beside(b) is b
    assert room.preemption.victim_beside(a) is a


@pytest.mark.parametrize(
    ("mode", "num_host_blocks", "block_copy_seconds", "swaps"),
    [
        ("swap", 2, 99.0, True),
        ("swap", 1, 0.0, False),
        ("recompute", 2, 0.0, False),
        # To compute its seven tokens again takes 7 seconds, to copy its two blocks twice as long
        # as to copy one.
        ("auto", 2, 3.4, True),
        ("auto", 2, 3.6, False),
        ("auto", 1, 3.4, False),
    ],
)
def test_a_victim_is_swapped_where_that_is_wanted_worth_it_and_possible(
    mode, num_host_blocks, block_copy_seconds, swaps
):
    room = Room(
        victim := low("a", prompt=8),
        preemption_mode=mode,
        num_host_blocks=num_host_blocks,
        block_copy_seconds=block_copy_seconds,
        enable_prefix_caching=False,
    )
    room.preemption.cost.note_step(num_prefill_tokens=4, num_tokens=4, seconds=4.0)
    device_block_ids = list(room.cache.block_ids("a"))
    copies = room.preemption.vacate(victim)
    assert room.cache.is_swapped("a") is swaps
    assert [copy.source for copy in copies] == (device_block_ids if swaps else [])
    assert all(isinstance(copy, BlockCopy) for copy in copies)
    assert victim.num_preemptions == 1
    assert victim.num_computed_tokens == (7 if swaps else 0)
    assert room.cache.pool.num_owned == 0
    stats = room.stats
    counted = stats.preemptions_swap, stats.preemptions_recompute, stats.preempted_tokens
    assert counted == ((1, 0, 0) if swaps else (0, 1, 7))


def test_auto_recomputes_what_the_prefix_cache_keeps():
    """With free blocks left, the victim's own are the last to be evicted: nothing is lost."""
    config = {"preemption_mode": "auto", "num_host_blocks": 2, "block_copy_seconds": 1.0}
    for num_blocks, kept in ((2, False), (8, True)):
        room = Room(victim := low("a", prompt=9), num_blocks=num_blocks + 1, **config)
        room.cache.remember([(victim, victim.num_computed_tokens)])
        room.preemption.cost.note_step(num_prefill_tokens=4, num_tokens=4, seconds=4.0)
        assert room.cache.num_dropped_tokens(victim) == (0 if kept else 8), num_blocks
        room.preemption.vacate(victim)
        assert room.cache.is_swapped("a") is not kept


def test_auto_does_not_count_blocks_that_another_request_holds():
    cache_of = {"enable_prefix_caching": True, "num_blocks": 6}
    victim = low("a", prompt=[5] * 9)
    room = Room(victim, **cache_of)
    room.cache.remember([(victim, 8)])
    other = low("b", prompt=[5] * 9)
    room.cache.admit(other)
    room.cache.grow("b", 9)
    assert room.cache.num_dropped_tokens(victim) == 0
