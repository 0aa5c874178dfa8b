"""Outputs that have to be of some form: the constraint is asked about tokens, and never told."""

from collections.abc import Sequence

import pytest

from engine.batch import UNKNOWN_TOKEN
from engine.request import FinishReason, Priority
from tests.engine.builders import (
    Machine,
    Residues,
    expected_tokens,
    expected_under,
    make_config,
    make_request,
)


class Told(Residues):
    """A control: it counts the questions instead of looking at the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._questions = 0

    def may_come(self, output: Sequence[int]) -> list[int]:
        self._questions += 1
        return super().may_come([*output, self._questions - len(output)])


def constrained(name: str = "c", **others):
    return make_request(name, **({"max_tokens": 12, "constraint": Residues()} | others))


def test_every_token_is_one_that_its_constraint_allows():
    machine = Machine(make_config())
    request, free = constrained(), make_request("free", max_tokens=12)
    machine.add(request, free)
    machine.run()
    tokens = machine.tokens("c")
    rule = Residues()
    assert all(token in rule.may_come(tokens[:place]) for place, token in enumerate(tokens))
    assert tokens == expected_under(rule, request) != expected_tokens(request)
    assert machine.tokens("free") == expected_tokens(free)


SHAPES = {
    "in small steps": {"max_num_batched_tokens": 3},
    "one after the other": {"max_num_seqs": 1},
    "preempted, and computed again": {"num_blocks": 14, "preemption_mode": "recompute"},
    "preempted, and swapped": {
        "num_blocks": 14,
        "num_host_blocks": 40,
        "preemption_mode": "swap",
    },
}


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_output_is_that_of_a_request_alone(shape, runs_ahead):
    machine = Machine(make_config(**shape), runs_ahead=runs_ahead)
    requests = [constrained(f"c{n}", prompt=6 + n, max_tokens=20) for n in range(3)]
    others = [make_request(f"free{n}", max_tokens=20) for n in range(2)]
    machine.add(*requests, *others)
    for _ in range(4):
        machine.step()
    machine.add(make_request("urgent", priority=Priority.CRITICAL, prompt=20, max_tokens=2))
    machine.run()
    if "preemption_mode" in shape:
        assert any(request.num_preemptions for request in requests)
    for request in requests:
        assert machine.tokens(request.request_id) == expected_under(Residues(), request)
    for request in others:
        assert machine.tokens(request.request_id) == expected_tokens(request)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("num_published", range(1, 12))
def test_taken_over_after_any_token_it_goes_on_as_it_would_have(num_published, runs_ahead):
    whole = expected_under(Residues(), constrained())
    machine = Machine(make_config(), runs_ahead=runs_ahead)
    machine.add(constrained(output=whole[:num_published]), make_request("free"))
    machine.run()
    assert machine.tokens("c") == whole[num_published:]


def tokens(constraint: Residues, *, num_failures: int) -> list[int]:
    """What comes when so many steps fail after the constraint was asked, and are computed again."""
    machine = Machine(make_config())
    launch, left = machine.runner.launch, [RuntimeError()] * num_failures

    def launch_and_fail(batch, *, after=None):
        step = launch(batch, after=after)
        if left:
            raise left.pop()
        return step

    machine.runner.launch = launch_and_fail
    machine.add(make_request("c", max_tokens=12, constraint=constraint))
    machine.run()
    assert machine.engine.snapshot().failed_steps == num_failures
    return machine.tokens("c")


def test_a_step_that_is_computed_twice_moves_it_once():
    assert tokens(Residues(), num_failures=1) == expected_under(Residues(), constrained())
    assert tokens(Told(), num_failures=1) != tokens(Told(), num_failures=0)


def test_no_step_is_launched_before_the_token_it_depends_on_is_known():
    machine = Machine(make_config(), runs_ahead=True)
    machine.add(make_request("before", max_tokens=3))
    machine.step()
    machine.add(constrained(max_tokens=5), make_request("free", max_tokens=9))
    machine.run()
    unknown_beside = [
        UNKNOWN_TOKEN in batch.decodes.token_ids
        for batch in machine.batches
        if "c" in [row.request_id for row in batch.rows]
    ]
    # It joined a step that was planned ahead, with a prompt that is known.
    assert unknown_beside == [True, False, False, False, False]
    assert any(UNKNOWN_TOKEN in batch.decodes.token_ids for batch in machine.batches[-3:])
    assert machine.tokens("c") == expected_under(Residues(), constrained(max_tokens=5))


@pytest.mark.parametrize("max_tokens", [6, 100])
def test_what_is_complete_ends_with_stop_even_where_it_may_not_be_longer(max_tokens):
    machine = Machine(make_config())
    machine.add(make_request("c", max_tokens=max_tokens, constraint=Residues(length=6)))
    machine.run()
    assert len(machine.tokens("c")) == 6
    assert machine.finish_reason("c") is FinishReason.STOP


def test_the_least_number_of_tokens_cannot_keep_what_is_complete_going():
    machine = Machine(make_config())
    request = make_request("c", max_tokens=9, min_tokens=8, constraint=Residues(length=6))
    machine.add(request)
    machine.run()
    assert (len(machine.tokens("c")), machine.finish_reason("c")) == (6, FinishReason.STOP)


def test_what_was_complete_when_its_worker_died_ends_without_another_token():
    whole = expected_under(Residues(length=6), constrained())
    machine = Machine(make_config())
    machine.add(constrained(output=whole, constraint=Residues(length=6)))
    machine.run()
    assert (machine.tokens("c"), machine.finish_reason("c")) == ([], FinishReason.STOP)
    assert machine.batches == []


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_where_nothing_may_come_the_request_fails_alone_and_says_why(runs_ahead):
    machine = Machine(make_config(), runs_ahead=runs_ahead)
    good = constrained("good", max_tokens=9)
    machine.add(make_request("bad", max_tokens=9, constraint=Residues(stuck_at=4)), good)
    machine.run()
    assert len(machine.tokens("bad")) == 4
    end = [output for output in machine.outputs if output.request_id == "bad"][-1]
    assert (end.finish_reason, end.error) == (FinishReason.REFUSED, "a rule without a way out")
    assert end.request.faulty_field == "residues"
    assert machine.tokens("good") == expected_under(Residues(), good)
