"""What requests do, as the engine tells it after each step."""

import pytest

from engine.request import Activity, FinishReason, Priority
from tests.engine.builders import Machine, make_config, make_request

PREFILLING, DECODING, PREEMPTED = Activity.PREFILLING, Activity.DECODING, Activity.PREEMPTED


def told_by_steps(machine: Machine, steps: int) -> list[dict[str, Activity]]:
    """What each of the next steps tells."""
    told = []
    for _ in range(steps):
        machine.step()
        told.append(machine.engine.take_activities())
    return told


def test_a_long_prompt_is_prefilling_until_its_last_chunk_and_then_decodes():
    machine = Machine(make_config(max_num_batched_tokens=8))
    machine.add(make_request("a", prompt=20, max_tokens=4))
    assert told_by_steps(machine, 4) == [{"a": PREFILLING}, {}, {"a": DECODING}, {}]


def test_a_prompt_of_one_step_is_never_seen_prefilling():
    machine = Machine(make_config())
    machine.add(make_request("a", prompt=9, max_tokens=4))
    assert told_by_steps(machine, 3) == [{"a": DECODING}, {}, {}]


def test_nothing_is_told_of_one_that_waits_for_a_slot():
    machine = Machine(make_config(max_num_seqs=1))
    machine.add(make_request("a", max_tokens=3), make_request("b", max_tokens=3))
    # "a" ends in the third step, so that "b" runs in the fourth.
    assert told_by_steps(machine, 4) == [{"a": DECODING}, {}, {}, {"b": DECODING}]


def test_a_preemption_and_the_return_from_it_are_told():
    machine = Machine(make_config(max_num_seqs=1))
    machine.add(make_request("low", max_tokens=6, priority=Priority.LOW))
    assert told_by_steps(machine, 2) == [{"low": DECODING}, {}]
    machine.add(make_request("high", max_tokens=2, priority=Priority.CRITICAL))
    assert told_by_steps(machine, 1) == [{"low": PREEMPTED, "high": DECODING}]
    assert told_by_steps(machine, 2) == [{}, {"low": DECODING}]


@pytest.mark.parametrize("is_preempted", [False, True])
def test_what_has_ended_is_forgotten(is_preempted):
    machine = Machine(make_config(max_num_seqs=1))
    machine.add(make_request("low", max_tokens=6, priority=Priority.LOW))
    machine.step()
    if is_preempted:
        machine.add(make_request("high", max_tokens=9, priority=Priority.CRITICAL))
        machine.step()
    machine.engine.abort("low", FinishReason.CANCELLED)
    machine.step()
    assert "low" not in machine.engine.take_activities()


def test_an_engine_that_nobody_asks_remembers_no_more_than_it_has_requests():
    machine = Machine(make_config())
    for number in range(50):
        machine.add(make_request(f"r{number}", max_tokens=2))
        machine.run()
    assert machine.engine.take_activities() == {}


def test_a_request_whose_draft_is_checked_still_decodes():
    machine = Machine(make_config(num_speculative_tokens=4), vocab_size=2)
    machine.add(make_request("a", prompt=[1] * 6, max_tokens=12))
    told = told_by_steps(machine, 5)
    assert machine.engine.snapshot().drafted_tokens > 0
    assert {activity for step in told for activity in step.values()} == {DECODING}
