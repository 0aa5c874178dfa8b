"""What a step computes under each batch mode, cap and kind of batching, as literal traces."""

from engine.scheduling.step_mix import MAX_PURE_DECODE_STEPS
from tests.engine.builders import Machine, make_config, make_request


def rows(machine: Machine) -> str:
    """The last step: tokens per request."""
    return " ".join(f"{row.request_id}:{len(row.token_ids)}" for row in machine.batches[-1].rows)


def steps(machine: Machine, count: int) -> list[str]:
    lines = []
    for _ in range(count):
        machine.step()
        lines.append(rows(machine))
    return lines


def begun(**overrides) -> Machine:
    """A machine on which `a` decodes, and `b` with 10 tokens of prompt has just arrived."""
    machine = Machine(make_config(max_num_batched_tokens=4, **overrides))
    machine.add(make_request("a", prompt=3, max_tokens=30))
    machine.step()
    machine.add(make_request("b", prompt=10, max_tokens=30))
    return machine


def test_mixed_steps_compute_the_decodes_and_as_much_prefill_as_is_left():
    assert steps(begun(), 4) == ["a:1 b:3", "a:1 b:3", "a:1 b:3", "a:1 b:1"]


def test_prefer_prefill_lets_the_decodes_wait_until_no_prefill_is_left():
    assert steps(begun(batch_mode="prefer-prefill"), 4) == ["b:4", "b:4", "b:2", "a:1 b:1"]


def test_prefer_prefill_decodes_when_no_slot_is_free():
    machine = begun(batch_mode="prefer-prefill", max_num_seqs=1)
    assert steps(machine, 2) == ["a:1", "a:1"]


def test_prefer_decode_computes_prefill_in_one_step_of_several():
    lines = steps(begun(batch_mode="prefer-decode"), 2 * MAX_PURE_DECODE_STEPS + 2)
    pure = ["a:1"] * MAX_PURE_DECODE_STEPS
    assert lines == [*pure, "a:1 b:3", *pure, "a:1 b:3"]


def test_prefer_decode_computes_prefill_at_once_when_nothing_decodes():
    machine = Machine(make_config(max_num_batched_tokens=4, batch_mode="prefer-decode"))
    machine.add(make_request("a", prompt=9))
    assert steps(machine, 3) == ["a:4", "a:4", "a:1"]


def test_prefer_decode_counts_only_steps_in_which_prefill_waits():
    machine = Machine(make_config(max_num_batched_tokens=4, batch_mode="prefer-decode"))
    machine.add(make_request("a", prompt=3, max_tokens=60))
    steps(machine, 20)
    machine.add(make_request("b", prompt=9))
    assert steps(machine, MAX_PURE_DECODE_STEPS + 1)[-1] == "a:1 b:3"


def test_the_cap_bounds_the_prefill_of_all_requests_in_a_step_and_not_the_decodes():
    machine = Machine(make_config(max_prefill_tokens=4))
    machine.add(*(make_request(name, prompt=3, max_tokens=9) for name in "abc"))
    assert steps(machine, 3) == ["a:3 b:1", "a:1 b:2 c:2", "a:1 b:1 c:1"]


def test_without_a_cap_prompts_fill_the_budget():
    machine = Machine(make_config())
    machine.add(*(make_request(name, prompt=3, max_tokens=9) for name in "abc"))
    assert steps(machine, 1) == ["a:3 b:3 c:3"]


def test_a_static_batch_admits_nobody_until_all_its_requests_have_ended():
    machine = Machine(make_config(dynamic_batching=False, max_num_seqs=2))
    lengths = {"a": 1, "b": 4, "c": 2, "d": 2}
    machine.add(*(make_request(name, max_tokens=length) for name, length in lengths.items()))
    assert steps(machine, 6) == ["a:5 b:5", "b:1", "b:1", "b:1", "c:5 d:5", "c:1 d:1"]


def test_a_static_batch_consists_of_the_requests_that_wait_when_it_begins():
    machine = Machine(make_config(dynamic_batching=False))
    machine.add(make_request("a", max_tokens=3))
    machine.step()
    machine.add(make_request("late", max_tokens=1))
    assert steps(machine, 3) == ["a:1", "a:1", "late:5"]


def test_a_static_batch_whose_prompts_take_several_steps_is_filled_over_these():
    machine = Machine(make_config(dynamic_batching=False, max_num_batched_tokens=4))
    machine.add(make_request("a", max_tokens=9), make_request("b", max_tokens=9))
    assert steps(machine, 4) == ["a:4", "a:1 b:3", "a:1 b:2", "a:1 b:1"]
