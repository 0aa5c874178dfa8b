"""How likely tokens were goes out with them, for those who ask and for nobody else."""

import pytest

from engine.fake_runner import fake_logprobs
from engine.request import FinishReason
from tests.engine.builders import Machine, make_config, make_request


def said_of(machine: Machine, request_id: str):
    """All that was said of a request's tokens, in order."""
    return [
        one
        for output in machine.outputs
        if output.request_id == request_id
        for one in output.logprobs
    ]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_each_token_of_those_who_ask_comes_with_what_is_said_of_it(runs_ahead):
    machine = Machine(make_config(), runs_ahead=runs_ahead)
    numbers = {"asks": 2, "asks for itself": 0, "does not": None}
    machine.add(*(make_request(name, max_tokens=5, logprobs=n) for name, n in numbers.items()))
    machine.run()
    for name in ("asks", "asks for itself"):
        tokens = machine.tokens(name)
        assert said_of(machine, name) == [fake_logprobs(id_, numbers[name]) for id_ in tokens]
    assert said_of(machine, "does not") == []


def test_a_step_that_is_tried_row_by_row_says_the_same():
    machine = Machine(make_config())
    machine.add(make_request("asks", max_tokens=2, logprobs=1), make_request("fails", logprobs=1))
    machine.runner.script.failing_request_ids.add("fails")
    machine.run()
    assert said_of(machine, "asks") == [fake_logprobs(id_, 1) for id_ in machine.tokens("asks")]
    assert machine.finish_reason("fails") is FinishReason.ERROR


def test_of_what_is_published_already_nothing_is_said_again():
    machine = Machine(make_config())
    machine.add(make_request("a", output=[5, 6], max_tokens=4, logprobs=1))
    machine.run()
    assert said_of(machine, "a") == [fake_logprobs(id_, 1) for id_ in machine.tokens("a")]
    assert len(said_of(machine, "a")) == 2
