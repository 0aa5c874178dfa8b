"""The log-probabilities of a prompt come once, with the first token, however it was computed."""

import numpy as np
import pytest

from engine.batch import BatchRow
from engine.errors import RequestRejected
from engine.fake_runner import fake_prompt_logprob
from engine.logprobs import Logprobs
from engine.request import FinishReason, Pooling, Priority, Request
from tests.engine.builders import Machine, make_config, make_request


def expected(request: Request) -> tuple[Logprobs, ...]:
    """What the fake model says of the prompt, from the whole of it."""
    prompt, asked = request.prompt_token_ids, request.sampling
    found = tuple(
        fake_prompt_logprob(prompt[:index], prompt[index], asked.prompt_logprobs)
        for index in range(asked.prompt_logprobs_from, len(prompt))
    )
    assert all(len(one.top) == asked.prompt_logprobs for one in found)
    return found


def num_scored(row: BatchRow) -> int:
    """How many tokens the row scored; the live list of its request's output has grown since."""
    return len(row._replace(output_token_ids=[]).scored)


def told_of(machine: Machine, request_id: str) -> tuple[Logprobs, ...]:
    """What was said of a prompt, checked to come with the first token and never again."""
    outputs = [one for one in machine.outputs if one.request_id == request_id]
    assert [one.start for one in outputs if one.prompt_logprobs] in ([], [0])
    assert not outputs or outputs[0].token_ids or not outputs[0].prompt_logprobs
    return outputs[0].prompt_logprobs


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"long_prefill_token_threshold": 3},
        {"max_scored_tokens": 5},
        {"max_scored_tokens": 1, "max_num_batched_tokens": 9},
        {"num_blocks": 14, "max_num_batched_tokens": 7},
        {"num_blocks": 14, "num_host_blocks": 20, "preemption_mode": "swap"},
    ],
    ids=str,
)
def test_each_prompt_is_told_of_whole_in_whatever_steps_it_is_computed(runs_ahead, sizes):
    machine = Machine(make_config(**sizes), runs_ahead=runs_ahead)
    requests = [
        make_request(f"r{length}", prompt=length, max_tokens=6, prompt_logprobs=length % 3)
        for length in (1, 2, 4, 5, 9, 16, 33)
    ]
    silent = make_request("silent", prompt=20, max_tokens=30)
    machine.add(*requests, silent)
    machine.run()
    assert told_of(machine, "silent") == ()
    for request in requests:
        assert told_of(machine, request.request_id) == expected(request)
        assert machine.finish_reason(request.request_id) is FinishReason.LENGTH
    most = max(sum(map(num_scored, batch.catch_up_rows)) for batch in machine.batches)
    assert 0 < most <= machine.config.max_scored_tokens


def test_asking_changes_no_token():
    tokens = []
    for number in (None, 2):
        machine = Machine(make_config(max_scored_tokens=4))
        names = ("a", "b")
        machine.add(*(make_request(name, prompt=19, prompt_logprobs=number) for name in names))
        machine.run()
        tokens.append([machine.tokens(name) for name in names])
    assert tokens[0] == tokens[1]


def test_a_cached_beginning_is_computed_again_only_where_it_must_give_logits():
    machine = Machine(make_config())
    prompt = list(range(1, 22))
    machine.add(make_request("before", prompt=prompt))
    machine.run()
    found = {}
    for first in (1, 8, 9, 21):
        request = make_request(
            f"from {first}", prompt=prompt, prompt_logprobs=1, prompt_logprobs_from=first
        )
        machine.add(request)
        machine.run()
        found[first] = request.num_cached_tokens
        assert told_of(machine, request.request_id) == expected(request)
    assert found == {1: 0, 8: 4, 9: 8, 21: 20}


def test_a_prompt_whose_slot_is_taken_half_way_is_told_of_once():
    machine = Machine(make_config(max_num_seqs=1, long_prefill_token_threshold=4))
    low = make_request("low", prompt=17, priority=Priority.LOW, prompt_logprobs=1)
    machine.add(low)
    machine.step()
    machine.step()
    machine.add(make_request("high", prompt=6, priority=Priority.CRITICAL, arrival=1.0))
    machine.run()
    assert low.num_preemptions == 1
    assert told_of(machine, "low") == expected(low)


def test_of_a_prompt_with_published_output_nothing_is_told_again():
    machine = Machine(make_config())
    request = make_request("r", prompt=9, output=[5], max_tokens=3, prompt_logprobs=1)
    machine.add(request)
    machine.run()
    assert told_of(machine, "r") == () and len(machine.tokens("r")) == 2
    assert not any(row.scored for batch in machine.batches for row in batch.rows)


def test_no_more_requests_wait_to_be_scored_than_a_step_has_tokens_of_prefill():
    """Each keeps a token: with more of them, none would be left, and nobody would get on."""
    machine = Machine(make_config(max_prefill_tokens=3, max_scored_tokens=1))
    for name in "abcdefgh":
        machine.add(make_request(name, prompt=4, prompt_logprobs=0))
    machine.run()


def test_steps_that_are_tried_row_by_row_tell_the_same():
    machine = Machine(make_config())
    asks, fails = (make_request(name, prompt=9, prompt_logprobs=2) for name in ("asks", "fails"))
    machine.runner.script.failing_request_ids.add("fails")
    machine.add(asks, fails)
    machine.run()
    assert told_of(machine, "asks") == expected(asks)
    assert told_of(machine, "fails") == () and fails.finish_reason is FinishReason.ERROR


def test_one_that_ends_before_its_first_token_leaves_nothing_behind():
    machine = Machine(make_config(long_prefill_token_threshold=2))
    machine.add(make_request("r", prompt=9, prompt_logprobs=1))
    machine.step()
    machine.engine.abort("r")
    machine.run()
    assert told_of(machine, "r") == ()
    again = make_request("r", prompt=9)
    machine.outputs.clear()
    machine.add(again)
    machine.run()
    assert told_of(machine, "r") == ()


@pytest.mark.parametrize("sizes", [{}, {"max_scored_tokens": 2}, {"num_blocks": 9}], ids=str)
def test_the_vector_of_a_continuation_has_the_likelihoods_of_its_tokens(sizes):
    machine = Machine(make_config(**sizes))
    requests = [
        make_request(f"r{length}", prompt=17 + length, prompt_logprobs=0, prompt_logprobs_from=17)
        for length in (1, 2, 7)
    ]
    for request in requests:
        request.pooling = Pooling()
    machine.add(*requests, make_request("beside", prompt=5, max_tokens=8))
    machine.run()
    for request in requests:
        assert request.finish_reason is FinishReason.POOLED and not request.output_token_ids
        wanted = [one.logprob for one in expected(request)]
        assert np.array_equal(request.vector, np.array(wanted, dtype=np.float32))
    assert machine.engine.snapshot().num_owned_blocks == 0


def test_an_engine_that_scores_no_prompts_refuses_by_name():
    machine = Machine(make_config(max_scored_tokens=0))
    with pytest.raises(RequestRejected) as refused:
        machine.add(make_request(prompt_logprobs=1))
    assert refused.value.field == "prompt_logprobs"
    machine.add(make_request())
    machine.run()
