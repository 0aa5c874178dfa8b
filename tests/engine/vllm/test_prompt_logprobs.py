"""The log-probabilities of a prompt over a fake of vLLM: once, with the first token, or alone."""

from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import RequestRejected
from engine.fake_runner import fake_prompt_logprob
from engine.logprobs import Logprobs
from engine.port import RequestOutput
from engine.request import FinishReason, Pooling, Priority, Request
from engine.sampling_params import SamplingParams
from engine.vllm.engine import VllmEngine
from tests.engine.vllm.fake_vllm import VOCAB_SIZE, FakeVllm

MODEL_LEN = 40


def engine_with(
    *, chunk: int = 4, max_num_seqs: int = 8, **sizes: Any
) -> tuple[VllmEngine, FakeVllm]:
    config = EngineConfig(
        num_blocks=64,
        max_model_len=MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        block_size=4,
        max_num_seqs=max_num_seqs,
        check_invariants=True,
        **sizes,
    )
    backend = FakeVllm(64, 4, chunk=chunk)
    return VllmEngine(config, backend), backend


def request(
    name: str, length: int, *, number: int | None = 1, first: int = 1, output=(), **fields: Any
) -> Request:
    return Request(
        name,
        [1 + (7 * index + length) % (VOCAB_SIZE - 1) for index in range(length)],
        SamplingParams(max_tokens=3, prompt_logprobs=number, prompt_logprobs_from=first),
        arrival_time=0.0,
        output_token_ids=list(output),
        **fields,
    )


def expected(request: Request) -> tuple[Logprobs, ...]:
    prompt, asked = request.prompt_token_ids, request.sampling
    return tuple(
        fake_prompt_logprob(prompt[:index], prompt[index], asked.prompt_logprobs or 0)
        for index in range(asked.prompt_logprobs_from, len(prompt))
    )


def run(engine: VllmEngine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for _ in range(100):
        if not engine.has_work():
            return outputs
        outputs += engine.step(lambda: 1.0)
    raise AssertionError("the engine does not come to an end")


def told_of(outputs: list[RequestOutput], name: str) -> tuple[Logprobs, ...]:
    """What was said of a prompt, checked to come with the first token and never again."""
    own = [one for one in outputs if one.request_id == name]
    assert [one.start for one in own if one.prompt_logprobs] in ([], [0])
    assert own[0].token_ids or not own[0].prompt_logprobs
    return own[0].prompt_logprobs


@pytest.mark.parametrize("chunk", [1, 4, 5, 100])
def test_each_prompt_is_told_of_whole_with_its_first_token(chunk):
    engine, _ = engine_with(chunk=chunk)
    asking = [request(f"r{length}", length, number=length % 3) for length in (1, 2, 5, 9, 16)]
    asking.append(request("from 7", 17, first=7))
    for one in (*asking, request("silent", 12, number=None)):
        engine.add_request(one)
    outputs = run(engine)
    assert told_of(outputs, "silent") == ()
    for one in asking:
        assert told_of(outputs, one.request_id) == expected(one)
        assert one.finish_reason is FinishReason.LENGTH and one.num_output_tokens == 3


def test_a_prompt_that_loses_its_slot_half_way_is_scored_again_and_told_of_once():
    engine, backend = engine_with(max_num_seqs=1)
    low = request("low", 13, priority=Priority.LOW)
    engine.add_request(low)
    outputs = engine.step(lambda: 1.0)
    outputs += engine.step(lambda: 1.0)
    engine.add_request(request("high", 6, number=None, priority=Priority.CRITICAL))
    outputs += run(engine)
    assert low.num_preemptions == 1
    assert told_of(outputs, "low") == expected(low)
    starts = [scored.start for name, scored in backend.scored if name == "low"]
    assert starts == [1, 5, 1, 5, 9]


def test_one_that_loses_its_slot_after_its_first_token_is_not_scored_again():
    engine, backend = engine_with(max_num_seqs=1)
    low = request("low", 4, priority=Priority.LOW)
    engine.add_request(low)
    outputs = engine.step(lambda: 1.0)
    assert low.num_output_tokens == 1
    engine.add_request(request("high", 6, number=None, priority=Priority.CRITICAL))
    outputs += run(engine)
    assert low.num_preemptions == 1 and told_of(outputs, "low") == expected(low)
    assert [name for name, _ in backend.scored] == ["low"]


def test_of_a_prompt_with_published_output_nothing_is_told_again():
    engine, backend = engine_with()
    engine.add_request(request("r", 9, output=[5]))
    assert told_of(run(engine), "r") == () and backend.scored == []


def test_one_that_ends_before_its_first_token_leaves_nothing_behind():
    engine, _ = engine_with()
    engine.add_request(request("r", 13))
    engine.step(lambda: 1.0)
    engine.abort("r")
    (ended,) = run(engine)
    assert ended.finish_reason is FinishReason.CANCELLED and not ended.prompt_logprobs
    engine.add_request(request("r", 13, number=None))
    assert told_of(run(engine), "r") == ()


def test_an_abort_in_the_step_that_brings_the_first_token_reports_neither():
    engine, backend = engine_with(chunk=100)
    backend._before_step = lambda: engine.abort("r")
    engine.add_request(request("r", 13))
    (ended,) = run(engine)
    assert ended.finish_reason is FinishReason.CANCELLED
    assert not ended.prompt_logprobs and not ended.token_ids


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_a_choice_ends_with_the_likelihoods_of_its_tokens_and_without_a_token(chunk):
    engine, backend = engine_with(chunk=chunk)
    choices = [
        request(f"r{length}", 17 + length, number=0, first=17, pooling=Pooling())
        for length in (1, 2, 7)
    ]
    for one in (*choices, request("beside", 5, number=None)):
        engine.add_request(one)
    outputs = run(engine)
    for one in choices:
        (ended,) = [output for output in outputs if output.request_id == one.request_id]
        assert (ended.token_ids, ended.text, ended.prompt_logprobs) == ((), "", ())
        assert one.finish_reason is FinishReason.POOLED and not one.output_token_ids
        assert one.vector is not None and one.vector.dtype == np.float32
        wanted = np.array([each.logprob for each in expected(one)], dtype=np.float32)
        assert np.array_equal(one.vector, wanted)
    assert engine.snapshot().generated_tokens == 3
    assert backend.requests == {}


def test_a_number_that_is_none_ends_its_request_alone():
    engine, backend = engine_with()
    backend.unscorable = {"bad": "a log-probability of the prompt is not a number"}
    good, bad = request("good", 9), request("bad", 9)
    for one in (bad, good):
        engine.add_request(one)
    outputs = run(engine)
    assert bad.finish_reason is FinishReason.ERROR
    assert told_of(outputs, "bad") == () and told_of(outputs, "good") == expected(good)
    (ended,) = [one for one in outputs if one.request_id == "bad"]
    assert ended.error == "a log-probability of the prompt is not a number"


def test_a_choice_without_room_behind_it_is_refused_by_name():
    engine, _ = engine_with()
    with pytest.raises(RequestRejected, match="leave no room") as refused:
        engine.add_request(request("r", MODEL_LEN, number=0, first=30, pooling=Pooling()))
    assert refused.value.field == "prompt"
    longest = request("r", MODEL_LEN - 1, number=0, first=30, pooling=Pooling())
    engine.add_request(longest)
    run(engine)
    assert longest.finish_reason is FinishReason.POOLED


def test_where_vllm_has_no_hidden_states_of_prompts_both_are_refused_by_name():
    engine, _ = engine_with(max_scored_tokens=0)
    for fields in ({}, {"pooling": Pooling()}):
        with pytest.raises(RequestRejected) as refused:
            engine.add_request(request("r", 9, **fields))
        assert refused.value.field == "prompt_logprobs"
    engine.add_request(request("r", 9, number=None))
    run(engine)
