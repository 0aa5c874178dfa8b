"""Requests of a model with a recurrent state: chunked, preempted, repeated and taken over."""

import pytest

from engine.cache.state_tags import StateTags
from engine.config import StateCapacity
from engine.request import NO_SLOT, FinishReason, Priority
from tests.engine.builders import Machine, expected_tokens, make_config, make_request


def make_machine(
    *, num_slots: int = 8, num_host_slots: int = 8, num_snapshots: int = 0, ahead=False, **config
) -> Machine:
    states = StateCapacity(num_slots, num_host_slots, num_snapshots, 0.0)
    return Machine(make_config(**config).with_states(states), runs_ahead=ahead)


def served(machine: Machine, *requests) -> Machine:
    machine.add(*requests)
    machine.run()
    for request in requests:
        whole = expected_tokens(request)
        assert machine.tokens(request.request_id) == whole[request.num_resumed_tokens :]
    assert machine.engine.violations() == []
    return machine


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("tokens", [3, 32])
def test_in_chunks_or_whole_beside_others_or_resumed_the_tokens_are_the_same(tokens, ahead):
    whole = expected_tokens(make_request("taken over", prompt=9, max_tokens=12))
    served(
        make_machine(max_num_batched_tokens=tokens, max_num_seqs=3, ahead=ahead),
        make_request("a", prompt=17, max_tokens=5),
        make_request("b", prompt=1, max_tokens=20),
        make_request("taken over", prompt=9, max_tokens=12, output=whole[:7]),
        make_request("c", prompt=30, max_tokens=3),
    )


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_for_blocks_both_modes_continue_with_the_same_state(mode, ahead):
    sizes = {"num_blocks": 8, "num_host_blocks": 16, "preemption_mode": mode}
    requests = [make_request(name, prompt=9, max_tokens=12) for name in "abc"]
    snapshot = served(make_machine(ahead=ahead, **sizes), *requests).engine.snapshot()
    assert getattr(snapshot, f"preemptions_{mode}") > 0


def test_without_a_host_slot_a_victim_is_computed_again():
    sizes = {"num_blocks": 8, "num_host_blocks": 16, "preemption_mode": "swap"}
    requests = [make_request(name, prompt=9, max_tokens=12) for name in "abc"]
    snapshot = served(make_machine(num_host_slots=0, **sizes), *requests).engine.snapshot()
    assert snapshot.preemptions_recompute > 0 == snapshot.preemptions_swap


def test_no_more_requests_run_than_there_are_slots_and_those_that_wait_hold_none():
    machine = make_machine(num_slots=2)
    requests = [make_request(f"r{index}", max_tokens=2) for index in range(1000)]
    machine.add(*requests)
    machine.step()
    assert sorted(one.state_slot for one in requests)[-3:] == [NO_SLOT, 0, 1]
    assert machine.engine.snapshot().num_running == 2
    machine.run(max_steps=2000)
    assert all(machine.tokens(one.request_id) == expected_tokens(one) for one in requests[:9])


def test_a_better_class_takes_the_slot_of_a_lower_one():
    machine = make_machine(num_slots=1, num_host_blocks=8, preemption_mode="swap")
    low = make_request("low", max_tokens=9, priority=Priority.LOW)
    machine.add(low)
    machine.step()
    high = make_request("high", max_tokens=2, priority=Priority.HIGH, arrival=1.0)
    served(machine, high)
    assert machine.tokens("low") == expected_tokens(low)
    assert machine.engine.snapshot().preemptions_swap == 1


def test_rows_that_are_retried_one_by_one_read_the_same_state_again():
    machine = make_machine()
    good, bad = make_request("good", max_tokens=6), make_request("bad", max_tokens=6)
    machine.add(good, bad)
    machine.step()
    machine.runner.script.failing_request_ids = {"bad"}
    machine.run()
    assert machine.tokens("good") == expected_tokens(good)
    assert machine.finish_reason("bad") is FinishReason.ERROR


def test_a_state_that_is_misplaced_is_noticed(monkeypatch, caplog):
    def always_first(self, slot, num_tokens):
        return 0

    monkeypatch.setattr(StateTags, "buffer_after", always_first)
    machine = make_machine()
    machine.add(make_request("a"), make_request("b", prompt=9))
    machine.run()
    assert machine.finish_reason("b") is FinishReason.ERROR
    assert "b has a corrupted state" in caplog.text


def test_a_model_with_a_state_has_no_drafts_and_without_snapshots_no_prefix_cache(caplog):
    caplog.set_level("INFO")
    config = make_config(num_speculative_tokens=3).with_states(StateCapacity(2, 1, 4, 0.5))
    assert config.enable_prefix_caching
    assert config.num_speculative_tokens == 0
    assert (config.num_state_slots, config.num_host_state_slots) == (2, 1)
    assert config.num_state_snapshots == 4
    assert "no drafts" in caplog.text and "no prefix cache" not in caplog.text
    assert not make_config().with_states(StateCapacity(2, 1, 0, 0.5)).enable_prefix_caching
    assert "no prefix cache" in caplog.text
    assert (
        make_config(enable_prefix_caching=False)
        .with_states(StateCapacity(1, 1, 4, 0.5))
        .num_state_snapshots
        == 0
    )
    assert make_config().with_states(None) == make_config()
