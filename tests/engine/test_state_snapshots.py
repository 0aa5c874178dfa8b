"""Prefix hits of a model with a recurrent state: from snapshots, and exact."""

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from engine.cache.state_tags import StateTags
from engine.config import StateCapacity
from engine.request import FinishReason, Priority
from tests.engine.builders import Machine, expected_tokens, make_config, make_request

PREFIX = list(range(100, 112))


def make_machine(*, num_snapshots: int = 4, ahead: bool = False, **config) -> Machine:
    values = {"num_host_blocks": 64} | config
    states = StateCapacity(8, 8, num_snapshots, 0.0)
    return Machine(make_config(**values).with_states(states), runs_ahead=ahead)


def request_behind(name: str, *tail: int, **options):
    """A request whose prompt begins with PREFIX, which fills three blocks."""
    return make_request(name, prompt=[*PREFIX, *tail], **options)


def served(machine: Machine, *requests) -> list[int]:
    """Serve requests one after the other, each exactly; the cached tokens of each."""
    for request in requests:
        machine.add(request)
        machine.run()
        whole = expected_tokens(request)
        assert machine.tokens(request.request_id) == whole[request.num_resumed_tokens :]
    assert machine.engine.violations() == []
    return [request.num_cached_tokens for request in requests]


def rows_of(machine: Machine, name: str) -> list[tuple[int, int]]:
    """Start and end of the rows that computed the prompt of a request, but for decodes.

    A last token of the prompt that is left alone is a decode.
    """
    rows = [row for batch in machine.batches for row in batch.catch_up_rows]
    return [(row.start, row.end) for row in rows if row.request_id == name]


def test_an_equal_prompt_begins_behind_the_snapshot_at_the_end_of_the_first():
    machine = make_machine()
    first, second = (request_behind(name, 1, 2, 3, 4, 5) for name in "ab")
    assert served(machine, first, second) == [0, 16]
    assert rows_of(machine, "a") == [(0, 16)]
    assert rows_of(machine, "b") == [(16, 17)]
    seen = machine.engine.snapshot()
    assert (seen.cached_prompt_tokens, seen.prompt_tokens) == (16, 34)


def test_a_prefix_without_a_snapshot_gets_one_when_the_next_prompt_parts_from_it():
    machine = make_machine()
    requests = [request_behind(name, *[tail] * 9) for tail, name in enumerate("abc", 1)]
    assert served(machine, *requests) == [0, 0, 12]
    assert rows_of(machine, "b") == [(0, 12), (12, 20)]
    assert rows_of(machine, "c") == [(12, 20)]


def test_snapshots_after_every_block_need_no_second_prompt():
    machine = make_machine(state_snapshot_blocks=1, num_snapshots=8)
    assert served(machine, request_behind("a", 1, 1), request_behind("b", 2, 2)) == [0, 12]
    assert rows_of(machine, "a") == [(0, 4), (4, 8), (8, 12), (12, 14)]


def test_the_least_recently_used_snapshot_gives_way_and_its_prompt_is_computed_again():
    machine = make_machine(num_snapshots=2)
    prompts = {name: [value] * 9 for value, name in enumerate("xyz", 1)}
    order = ["x1", "y1", "x2", "z1", "x3", "y2"]
    requests = [make_request(name, prompt=prompts[name[0]]) for name in order]
    assert served(machine, *requests) == [0, 0, 8, 0, 8, 0]


def test_a_snapshot_without_its_blocks_and_blocks_without_a_snapshot_are_no_hit():
    machine = make_machine(num_blocks=8)
    again = [make_request(name, prompt=9) for name in ("a", "b", "c")]
    for request in again:
        request.prompt_token_ids = again[0].prompt_token_ids
    large = make_request("large", prompt=[5] * 29, max_tokens=1)
    assert served(machine, again[0], large, again[1], again[2]) == [0, 0, 0, 8]
    without = make_machine(num_snapshots=0)
    assert served(without, request_behind("a", 1), request_behind("b", 1)) == [0, 0]


def test_only_equal_salts_and_adapters_share_a_snapshot():
    machine = make_machine(adapters=frozenset({"x"}))
    plain, salted, adapted = (request_behind(name, 1) for name in "abc")
    salted.cache_salt, adapted.adapter = "tenant", "x"
    again = request_behind("d", 1, adapter="x")
    assert served(machine, plain, salted, adapted, again) == [0, 0, 0, 12]


def test_a_request_with_published_tokens_begins_behind_its_prompt():
    machine = make_machine()
    whole = expected_tokens(request_behind("a", 1, max_tokens=9))
    resumed = request_behind("b", 1, max_tokens=9, output=whole[:7])
    assert served(machine, request_behind("a", 1, max_tokens=9), resumed) == [0, 12]


def test_a_drawn_choice_shares_the_prompt_of_the_one_before_it():
    machine = make_machine()
    choices = [request_behind(f"choice {seed}", 1, seed=seed) for seed in range(3)]
    assert served(machine, *choices) == [0, 12, 12]
    assert len({tuple(machine.tokens(one.request_id)) for one in choices}) == 3


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_behind_a_prefix_hit_both_modes_continue_with_the_same_state(mode, ahead):
    machine = make_machine(num_blocks=10, preemption_mode=mode, ahead=ahead)
    served(machine, request_behind("first", 1, max_tokens=1))
    requests = [request_behind(name, 1, max_tokens=14) for name in "abc"]
    machine.add(*requests)
    machine.run()
    assert all(machine.tokens(one.request_id) == expected_tokens(one) for one in requests)
    assert [one.num_cached_tokens for one in requests] == [12] * 3
    assert getattr(machine.engine.snapshot(), f"preemptions_{mode}") > 0
    assert machine.engine.violations() == []


def test_a_request_that_begins_again_behind_its_own_output_takes_no_snapshot_there():
    modes = {"preemption_mode": "recompute", "policy": "priority"}
    machine = make_machine(num_snapshots=1, num_blocks=16, max_num_seqs=1, **modes)
    long = request_behind("long", 1, 2, 3, 4, 5, max_tokens=20)
    machine.add(long)
    for _ in range(14):
        machine.step()
    machine.add(make_request("urgent", prompt=2, max_tokens=1, priority=Priority.HIGH))
    machine.run()
    assert long.num_preemptions == 1
    assert [end for _, end in rows_of(machine, "long")] == [16, 30]
    assert served(machine, request_behind("equal", 1, 2, 3, 4, 5)) == [16]


def test_auto_counts_what_lies_behind_the_last_snapshot_as_lost():
    machine = make_machine(num_snapshots=1, max_num_seqs=2)
    request = request_behind("a", 1, 2, 3, 4, 5, max_tokens=20)
    machine.add(request)
    for _ in range(12):
        machine.step()
    cache = machine.engine._scheduler.kv_cache
    assert cache.num_dropped_tokens(request) == request.num_computed_tokens - 16
    served(machine, make_request("other", prompt=9, max_tokens=1))


def test_a_snapshot_is_restored_and_overwritten_in_one_step():
    machine = make_machine(num_snapshots=1)
    served(machine, request_behind("first", 1))
    requests = [request_behind("hit", 1), make_request("other", prompt=9)]
    machine.add(*requests)
    machine.step()
    batch = machine.batches[-1]
    assert [copy.source for copy in batch.state_restored] == [0]
    assert [row.snapshot_slot for row in batch.catch_up_rows] == [-1, 0]
    machine.run()
    assert all(machine.tokens(one.request_id) == expected_tokens(one) for one in requests)


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.RELEASED])
def test_a_request_that_ends_while_its_snapshot_is_in_flight_leaves_nothing_behind(reason):
    machine = make_machine(ahead=True)
    machine.add(request_behind("a", *range(1, 40)), make_request("b", max_tokens=30))
    machine.step()
    machine.engine.abort("a", reason)
    machine.run()
    assert served(machine, request_behind("c", *range(1, 40))) in ([0], [12], [24])


def test_rows_that_are_retried_one_by_one_take_their_snapshots():
    machine = make_machine()
    good, bad = request_behind("good", 1), make_request("bad", prompt=9)
    machine.runner.script.failing_request_ids = {"bad"}
    machine.add(good, bad)
    machine.run()
    assert machine.finish_reason("bad") is FinishReason.ERROR
    machine.runner.script.failing_request_ids = set()
    assert served(machine, request_behind("again", 1)) == [12]


def test_a_snapshot_of_another_prefix_is_noticed(monkeypatch, caplog):
    def always_first(self, snapshot, slot, num_tokens):
        return self.first_snapshot, self.put(slot, num_tokens)

    machine = make_machine()
    served(machine, make_request("other", prompt=13), request_behind("a", 1))
    monkeypatch.setattr(StateTags, "restore", always_first)
    machine.add(request_behind("b", 1))
    machine.run()
    assert machine.finish_reason("b") is FinishReason.ERROR
    assert "b has a corrupted state" in caplog.text


beginnings = st.integers(0, 2).flatmap(
    lambda kind: st.integers(6, 14).map(lambda length: [50 + kind] * length)
)
prompts = st.builds(
    lambda begin, tail: [*begin, *tail], beginnings, st.lists(st.integers(1, 2), max_size=8)
).filter(bool)


@settings(max_examples=120, deadline=None)
@given(
    sizes=st.fixed_dictionaries(
        {
            "num_blocks": st.integers(12, 30),
            "num_host_blocks": st.sampled_from([0, 4, 40]),
            "max_num_seqs": st.integers(1, 5),
            "max_num_batched_tokens": st.sampled_from([3, 8, 32]),
            "long_prefill_token_threshold": st.sampled_from([0, 2]),
            "state_snapshot_blocks": st.sampled_from([0, 0, 1, 2]),
            "preemption_mode": st.sampled_from(["swap", "recompute", "auto"]),
        }
    ),
    num_snapshots=st.integers(0, 6),
    num_host_slots=st.sampled_from([0, 1, 6]),
    ahead=st.booleans(),
    plan=st.lists(
        st.tuples(
            st.integers(0, 6),
            prompts,
            st.integers(1, 16),
            st.sampled_from(Priority),
            st.none() | st.integers(0, 9),
        ),
        min_size=2,
        max_size=14,
    ),
)
def test_whatever_is_cached_evicted_or_preempted_each_request_says_what_it_says_alone(
    sizes, num_snapshots, num_host_slots, ahead, plan
):
    """The laws are checked after every step; the fake model compares state and cache."""
    config = make_config(**sizes).with_states(StateCapacity(5, num_host_slots, num_snapshots, 0.1))
    machine = Machine(config, runs_ahead=ahead)
    requests, aborts = [], {}

    def step() -> None:
        machine.step()
        for name in [name for name, due in aborts.items() if due <= machine.now]:
            machine.engine.abort(name)
            del aborts[name]

    for number, (gap, prompt, max_tokens, priority, abort_after) in enumerate(plan):
        for _ in range(gap):
            step()
        one = make_request(
            f"r{number}",
            prompt=prompt,
            max_tokens=max_tokens,
            priority=priority,
            arrival=machine.now,
        )
        requests.append(one)
        machine.add(one)
        if abort_after is not None:
            aborts[one.request_id] = machine.now + abort_after
    while machine.engine.has_work():
        assert machine.now < 3000, "livelock"
        step()
    for one in requests:
        tokens = machine.tokens(one.request_id)
        assert tokens == expected_tokens(one)[: len(tokens)]
        assert one.finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
    event(f"hits: {min(3, sum(one.num_cached_tokens > 0 for one in requests))}")
    event(f"preempted: {any(one.num_preemptions for one in requests)}")
