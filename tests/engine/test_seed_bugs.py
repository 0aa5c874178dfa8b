"""A regression test for each bug of the reference systems that an engine could have, by its id.

Where another test proves the same, docs/reference/reference-systems.md names that one. B01 belongs
to the wire, B20 to B23, B35 and B64 to the model runner, B33, B37, B63 and B66 to the service.
"""

import copy
import dataclasses
import sys
from collections.abc import Callable

import pytest

from engine.cache.block_pool import BlockPool
from engine.errors import RequestRejected
from engine.request import LEGAL_TRANSITIONS, FinishReason, Priority, RequestState
from engine.scheduling.picture_budget import PictureBudget
from engine.scheduling.plan import Plan
from engine.scheduling.waiting_queue import WaitingQueue
from tests.engine.builders import Machine, expected_tokens, make_config, make_request


def ends(machine: Machine) -> dict[str, FinishReason]:
    return {o.request_id: o.finish_reason for o in machine.outputs if o.finish_reason}


def test_b05_b11_and_b12_times_are_frozen_complete_and_never_negative():
    machine = Machine(make_config())
    machine.add(make_request("done", max_tokens=3), make_request("aborted", max_tokens=30))
    machine.step()
    machine.step()
    machine.engine.abort("aborted")
    machine.run()
    finals = [output.request for output in machine.outputs if output.finish_reason]
    frozen = [copy.copy(request.times) for request in finals]
    machine.add(make_request("later", max_tokens=9))
    machine.run()
    for request, before in zip(finals, frozen, strict=True):
        times = request.times
        assert dataclasses.asdict(times) == dataclasses.asdict(before)
        assert times.arrival <= times.first_scheduled <= times.first_token <= times.finished


@pytest.mark.parametrize("budget", [32, 7, 4])
def test_b04_b06_b07_b25_b42_and_b59_each_position_is_computed_once_and_fed_its_own_token(budget):
    machine = Machine(make_config(max_num_batched_tokens=budget))
    request = make_request("a", prompt=10, max_tokens=5)
    machine.add(request)
    machine.run()
    fed = [
        (row.start + offset, token_id)
        for batch in machine.batches
        for row in batch.rows
        for offset, token_id in enumerate(row.token_ids)
    ]
    whole = [*request.prompt_token_ids, *expected_tokens(request)]
    assert fed == list(enumerate(whole[:-1]))


def test_b09_and_b51_an_illegal_transition_is_our_bug_and_finished_is_absorbing():
    assert LEGAL_TRANSITIONS[RequestState.FINISHED] == frozenset()
    with pytest.raises(AssertionError):
        make_request().transition(RequestState.PREEMPTED)


def test_b17_more_requests_run_than_their_max_tokens_could_ever_reserve():
    machine = Machine(make_config(num_blocks=16, max_num_seqs=8))
    machine.add(*(make_request(f"r{index}", prompt=4, max_tokens=40) for index in range(8)))
    machine.step()
    # Reserving prompt + max_tokens, 11 blocks each, would let one run.
    assert machine.engine.snapshot().num_running == 8


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_b24_slight_oversubscription_ends_without_thrashing(mode):
    config = make_config(num_blocks=19, num_host_blocks=19, preemption_mode=mode)
    machine = Machine(config)
    requests = [make_request(f"r{index}", prompt=4, max_tokens=17) for index in range(4)]
    machine.add(*requests)
    machine.run(max_steps=80)
    for request in requests:
        assert machine.tokens(request.request_id) == expected_tokens(request)
    seen = machine.engine.snapshot()
    assert 1 <= seen.preemptions_recompute + seen.preemptions_swap <= 4


def test_b26_a_request_is_in_a_batch_once_and_the_budget_is_kept():
    config = make_config(num_blocks=10, num_host_blocks=10, preemption_mode="swap")
    machine = Machine(config)
    machine.add(*(make_request(f"r{index}", prompt=9, max_tokens=12) for index in range(6)))
    machine.run()
    for batch in machine.batches:
        ids = [row.request_id for row in batch.rows]
        assert len(ids) == len(set(ids)) <= config.max_num_seqs
        assert batch.num_tokens <= config.max_num_batched_tokens


@pytest.mark.parametrize(
    ("prompt", "chunk"),
    [(511, 512), (512, 512), (513, 512), (1025, 512), (4000, 512), (513, 7), (512, 1)],
)
def test_b28_chunk_size_never_shows_in_the_output(prompt, chunk):
    config = make_config(
        num_blocks=300,
        block_size=16,
        max_model_len=8192,
        max_num_batched_tokens=chunk,
        check_invariants=False,
    )
    machine = Machine(config)
    request = make_request("a", prompt=prompt, max_tokens=3)
    machine.add(request)
    machine.run()
    assert machine.tokens("a") == expected_tokens(request)


def test_b29_a_preempted_request_longer_than_the_budget_resumes_in_chunks():
    config = make_config(
        num_blocks=16,
        max_num_batched_tokens=4,
        preemption_mode="recompute",
        enable_prefix_caching=False,
    )
    machine = Machine(config)
    requests = [make_request(name, prompt=20, max_tokens=20) for name in "ab"]
    machine.add(*requests)
    machine.run()
    assert machine.engine.snapshot().preemptions_recompute > 0
    for request in requests:
        assert machine.tokens(request.request_id) == expected_tokens(request)


def test_b40_nothing_advances_before_the_device_has_computed_it():
    machine = Machine(make_config())
    machine.add(make_request("a"))
    request = machine.engine._scheduler.requests["a"]
    machine.engine._scheduler.schedule(now=0.0)
    again = machine.engine._scheduler.schedule(now=0.0)
    assert request.num_computed_tokens == 0
    assert again.rows[0].token_ids == request.prompt_token_ids


def test_b44_and_b52_a_request_at_its_limit_is_finished_by_the_engine_and_leaves_no_work():
    machine = Machine(make_config())
    assert not machine.engine.has_work()
    machine.add(make_request("a", max_tokens=1))
    assert machine.engine.has_work()
    machine.step()
    assert not machine.engine.has_work()


def test_b57_a_pool_of_no_blocks_is_refused_by_the_configuration():
    with pytest.raises(AssertionError):
        make_config(num_blocks=0)
    assert BlockPool(0).num_free == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_b61_the_cause_of_a_preemption_is_admitted_before_its_victim(mode):
    machine = Machine(make_config(max_num_seqs=1, num_host_blocks=16, preemption_mode=mode))
    low = make_request("low", max_tokens=12, priority=Priority.LOW)
    machine.add(low)
    machine.step()
    machine.add(make_request("high", max_tokens=4, priority=Priority.HIGH, arrival=1.0))
    machine.run()
    seen = machine.engine.snapshot()
    assert list(ends(machine)) == ["high", "low"]
    assert seen.preemptions_recompute + seen.preemptions_swap == 1
    assert machine.tokens("low") == expected_tokens(low)


def test_b62_a_finished_request_leaves_nothing_behind():
    machine = Machine(make_config())
    for index in range(50):
        machine.add(make_request(f"r{index}", max_tokens=2))
        machine.run()
    scheduler = machine.engine._scheduler
    assert not scheduler.requests
    assert not scheduler.running
    assert not scheduler.kv_cache._tables
    assert not scheduler._waiting._num_entries


def test_b65_every_request_of_a_large_batch_has_its_own_right_length_and_tokens():
    config = make_config(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=256)
    machine = Machine(config)
    requests = [
        make_request(f"r{index}", prompt=1 + index, max_tokens=1 + 31 - index)
        for index in range(32)
    ]
    machine.add(*requests)
    machine.run()
    for request in requests:
        assert machine.tokens(request.request_id) == expected_tokens(request)


# -- knobs, limits, costs and utilization ---------------------------------------------------------

#: For each knob of the scheduler two values under which `busy` must not give the same steps.
KNOBS = {
    "policy": ("fcfs", "priority"),
    "aging_seconds": (0.001, 50.0),
    "max_num_seqs": (2, 8),
    "max_num_batched_tokens": (8, 32),
    "long_prefill_token_threshold": (0, 3),
    "max_prefill_tokens": (0, 6),
    "batch_mode": ("mixed", "prefer-prefill"),
    "dynamic_batching": (True, False),
    "watermark": (0.0, 0.5),
    "enable_prefix_caching": (True, False),
    "preemption_mode": ("swap", "recompute"),
    "num_host_blocks": (0, 12),
    "num_blocks": (12, 40),
    "block_size": (4, 3),
    "num_speculative_tokens": (0, 3),
    "max_speculative_step_tokens": (2, 32),
    "block_copy_seconds": (0.0, 9.0),
}
#: What a knob needs beside it to matter.
BESIDE = {
    "preemption_mode": {"num_host_blocks": 12},
    "num_host_blocks": {"preemption_mode": "swap"},
    "max_speculative_step_tokens": {"num_speculative_tokens": 3},
    "block_copy_seconds": {
        "num_host_blocks": 12,
        "preemption_mode": "auto",
        "enable_prefix_caching": False,
    },
}


def busy(**overrides) -> list[tuple]:
    """Steps of twelve requests of all classes that arrive at a small engine: rows and swaps."""
    config = make_config(**({"num_blocks": 12, "max_num_seqs": 4} | overrides))
    machine = Machine(config, vocab_size=3)
    for index in range(12):
        priority = Priority((index * 7) % 4)
        prompt = [7] * (3 + 5 * (index % 3))
        machine.add(
            make_request(
                f"r{index}", prompt=prompt, max_tokens=9, priority=priority, arrival=machine.now
            )
        )
        machine.now += 1.0
        machine.outputs += machine.engine.step(_ticking(machine.now))
    while machine.engine.has_work():
        machine.now += 1.0
        machine.outputs += machine.engine.step(_ticking(machine.now))
    return [
        ([(row.request_id, len(row.token_ids)) for row in batch.rows], len(batch.swap_out))
        for batch in machine.batches
    ]


def _ticking(start: float) -> Callable[[], float]:
    """A clock that goes on by an eighth of a second whenever it is read."""
    readings = iter(start + tick / 8 for tick in range(1000))
    return lambda: next(readings)


@pytest.mark.parametrize("knob", KNOBS)
def test_b27_and_b60_every_knob_of_the_scheduler_changes_what_it_does(knob):
    first, second = (busy(**(BESIDE.get(knob, {}) | {knob: value})) for value in KNOBS[knob])
    assert first != second
    assert busy(**BESIDE.get(knob, {})) == busy(**BESIDE.get(knob, {})), "a step is drawn by lot"


def test_b49_a_better_class_and_a_lack_of_blocks_preempt_and_old_prefixes_are_evicted():
    machine = Machine(make_config(num_blocks=4))
    machine.add(make_request("low", prompt=7, max_tokens=9, priority=Priority.LOW))
    machine.step()
    machine.add(make_request("high", prompt=9, max_tokens=2, priority=Priority.HIGH, arrival=1.0))
    machine.step()
    assert [row.request_id for row in machine.batches[-1].rows] == ["high"]
    machine.run()
    assert machine.engine.snapshot().preemptions_recompute == 1
    machine.add(make_request("other", prompt=15, max_tokens=1))
    machine.run()
    assert machine.finish_reason("other") is FinishReason.LENGTH


@pytest.mark.parametrize("knob", [{}, {"policy": "sjf"}, {"policy": "adaptive"}])
def test_b50_a_step_costs_no_more_calls_with_many_waiting_than_with_few(knob):
    """Counts calls instead of seconds: a queue that is searched or sorted makes more of them."""
    few, many = (calls_of_a_step(num_waiting, **knob) for num_waiting in (100, 10_000))
    assert many <= few + 20


def test_b50_the_count_of_calls_notices_a_queue_that_is_searched(monkeypatch):
    peek = WaitingQueue.peek

    def searching(self, above=None, **others):
        sum(request.priority > 3 for _, request in self._heaps[Priority.NORMAL])
        return peek(self, above, **others)

    monkeypatch.setattr(WaitingQueue, "peek", searching)
    assert calls_of_a_step(10_000) > calls_of_a_step(100) + 5_000


def calls_of_a_step(num_waiting: int, **overrides) -> int:
    """Python and C functions called by a step that ends one request and admits another."""
    machine = Machine(make_config(max_num_seqs=1, check_invariants=False, **overrides))
    for index in range(num_waiting):
        machine.add(make_request(f"r{index}", max_tokens=1))
    machine.step()
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        machine.step()
    finally:
        sys.setprofile(None)
    assert len(machine.batches[-1].rows) == 1
    return calls


def test_b53_who_finds_no_slot_waits_and_is_served_and_the_too_long_is_refused():
    machine = Machine(make_config(max_num_seqs=4, max_model_len=40))
    requests = [make_request(f"r{index}", max_tokens=3) for index in range(5)]
    machine.add(*requests)
    machine.step()
    assert machine.engine.snapshot().num_waiting == 1
    with pytest.raises(RequestRejected):
        machine.add(make_request("long", prompt=40))
    machine.run()
    assert all(machine.tokens(one.request_id) == expected_tokens(one) for one in requests)


def test_b45_and_b53_a_request_that_waits_for_a_slot_can_be_cancelled_and_never_runs():
    machine = Machine(make_config(max_num_seqs=1))
    machine.add(make_request("first", max_tokens=9), make_request("second"))
    machine.step()
    machine.engine.abort("second")
    machine.run()
    assert machine.finish_reason("second") is FinishReason.CANCELLED
    assert {row.request_id for batch in machine.batches for row in batch.rows} == {"first"}


def test_b54_tokens_are_counted_as_they_come_and_not_when_their_request_ends():
    machine = Machine(make_config())
    machine.add(make_request("a", max_tokens=6), make_request("b", max_tokens=3))
    counted = []
    for _ in range(8):
        machine.step()
        counted.append(machine.engine.snapshot().generated_tokens)
    # Two a step while both run, one when b has ended, and none by an idle engine.
    assert counted == [2, 4, 6, 7, 8, 9, 9, 9]


def test_b56_a_plan_cannot_take_more_tokens_than_its_budget_nor_than_its_cap_on_prefill():
    request = make_request("a", prompt=9)
    for budget, cap in ((8, 9), (9, 8)):
        plan = Plan(
            budget=budget, prefill_budget=cap, scored_budget=0, pictures=PictureBudget(0), now=0.0
        )
        plan.take(request, end=9, block_ids=[0, 1, 2])
        with pytest.raises(AssertionError):
            plan.as_batch(1, None)


def test_b58_utilization_is_computed_when_it_is_read():
    machine = Machine(make_config(max_num_seqs=4, num_blocks=10, max_num_batched_tokens=10))
    machine.add(make_request("a", prompt=5, max_tokens=2), make_request("b", prompt=5))
    seen = []
    for _ in range(4):
        machine.step()
        now = machine.engine.snapshot()
        seen.append((now.slot_usage, now.kv_cache_usage, now.batch_usage))
    assert seen == [(0.5, 0.4, 1.0), (0.25, 0.2, 0.2), (0.25, 0.2, 0.1), (0.0, 0.0, 0.0)]


def test_b60_a_preference_for_decodes_decodes_and_starves_no_prompt():
    machine = Machine(make_config(batch_mode="prefer-decode", max_num_batched_tokens=8))
    machine.add(make_request("decoding", prompt=3, max_tokens=60))
    machine.step()
    machine.add(make_request("prompt", prompt=20, max_tokens=2, arrival=1.0))
    machine.step()
    assert [row.request_id for row in machine.batches[-1].rows] == ["decoding"]
    machine.run(max_steps=100)
    assert list(dict.fromkeys(o.request_id for o in machine.outputs if o.finish_reason)) == [
        "prompt",
        "decoding",
    ]
