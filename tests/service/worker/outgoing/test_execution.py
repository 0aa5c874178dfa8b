"""What a terminal record says of its last claim: times, steps, speed and swaps."""

import pytest

from engine.request import Priority
from quire.wire.protocol import Execution
from service.worker.outgoing.completions import Origin, completion_of
from tests.engine.builders import Machine, expected_tokens, make_config, make_request


def execution_of(machine: Machine, name: str, *, received: float = 0.0) -> Execution:
    (end,) = [o for o in machine.outputs if o.request_id == name and o.finish_reason]
    origin = Origin(request_id=name, model="m", received=received)
    found = completion_of(origin, end).execution
    assert found is not None
    return found


def test_a_record_has_the_times_and_the_speed_of_its_phases():
    """One step a second: claimed at 0, first step at 4, nine tokens of prompt in two steps."""
    machine = Machine(make_config(max_num_batched_tokens=8), now=3.0)
    machine.add(make_request("a", prompt=9, max_tokens=5))
    machine.run()
    assert execution_of(machine, "a") == Execution(
        waiting_seconds=4.0,
        prefill_seconds=1.0,
        decode_seconds=4.0,
        processing_seconds=5.0,
        decode_steps=4,
        tokens_per_second=1.0,
    )


def test_a_record_says_what_preemption_cost():
    machine = Machine(make_config(max_num_seqs=1, num_host_blocks=16, preemption_mode="swap"))
    machine.add(make_request("low", max_tokens=12, priority=Priority.LOW))
    machine.step()
    machine.add(make_request("high", max_tokens=4, priority=Priority.HIGH, arrival=1.0))
    machine.run()
    low = execution_of(machine, "low")
    assert (low.preempted_seconds, low.swaps) == (4.0, 1)
    assert (low.decode_seconds, low.decode_steps) == (15.0, 11)
    assert low.tokens_per_second == round(11 / 15, 2)
    assert execution_of(machine, "high").swaps == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_record_counts_the_preemptions_of_its_claim_in_either_mode(mode):
    machine = Machine(make_config(max_num_seqs=1, num_host_blocks=16, preemption_mode=mode))
    machine.add(make_request("low", max_tokens=12, priority=Priority.LOW))
    for index in range(2):
        machine.step()
        high = make_request(f"h{index}", max_tokens=1, priority=Priority.HIGH, arrival=machine.now)
        machine.add(high)
        machine.step()
        machine.step()
    machine.run()
    ends = {o.request_id: o for o in machine.outputs if o.finish_reason}
    counts = {
        name: completion_of(Origin(request_id=name, model="m"), end).preemptions
        for name, end in ends.items()
    }
    assert counts == {"low": 2, "h0": 0, "h1": 0}


def test_a_resumed_request_counts_only_what_this_claim_has_done():
    machine = Machine(make_config())
    published = expected_tokens(make_request("a", max_tokens=9))[:6]
    machine.add(make_request("a", max_tokens=9, output=published))
    machine.run()
    found = execution_of(machine, "a")
    assert (found.decode_steps, found.decode_seconds, found.tokens_per_second) == (2, 2.0, 1.0)


def test_an_accepted_draft_takes_no_step_of_its_own():
    machine = Machine(make_config(num_speculative_tokens=4), vocab_size=2)
    machine.add(make_request("a", prompt=[1] * 6, max_tokens=12))
    machine.run()
    accepted = machine.engine.snapshot().accepted_draft_tokens
    assert accepted > 0
    assert execution_of(machine, "a").decode_steps == 11 - accepted
    assert len(machine.batches) == 12 - accepted


def test_one_token_has_no_speed_and_a_request_that_never_ran_has_no_times():
    machine = Machine(make_config(max_num_seqs=1))
    machine.add(make_request("a", max_tokens=1), make_request("b"))
    machine.engine.abort("b")
    machine.run()
    assert execution_of(machine, "a").tokens_per_second is None
    assert execution_of(machine, "b") == Execution()
