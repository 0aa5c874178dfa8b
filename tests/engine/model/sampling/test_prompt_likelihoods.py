"""The log-probabilities of prompts, against the softmax of transformers' logits."""

import math

import pytest
import torch

from engine.model.sampling.likelihoods import PromptLikelihoods
from engine.request import FinishReason, Pooling
from tests.engine.model.builders import (
    Generated,
    Oracle,
    engine_over,
    generate,
    make_prompt,
    make_request,
    make_row,
    make_runner,
)
from tests.engine.model.sampling.test_likelihoods import (
    TOLERANCE,
    errors_of,
    runner_and_oracle,
)

ASKED = [
    {"prompt_logprobs": 3},
    {"prompt_logprobs": 0, "prompt_logprobs_from": 7, "logprobs": 2},
    {"prompt_logprobs": 20, "temperature": 1.2, "top_p": 0.8},
    {},
    {"prompt_logprobs": 1, "prompt_logprobs_from": 40},
]


@pytest.fixture(scope="module", params=["llama", "gemma2", "qwen3 wide", "abacus"])
def subject(request, model_folder):
    return runner_and_oracle(request.param, model_folder)


def without_prompt(sampling):
    return {name: value for name, value in sampling.items() if not name.startswith("prompt_")}


def requests(*, asked=ASKED, published=()):
    return [
        make_request(
            str(index),
            make_prompt(6 + 9 * index, salt=index),
            output=published,
            seed=index,
            **sampling,
        )
        for index, sampling in enumerate(asked)
    ]


def largest_error(oracle: Oracle, found: Generated, *, shift: int = 0) -> float:
    errors = []
    for request in requests():
        told = found.prompt_logprobs.get(request.request_id, ())
        asked, prompt = request.sampling, request.prompt_token_ids
        if asked.prompt_logprobs is None:
            assert told == ()
            continue
        first = asked.prompt_logprobs_from
        assert len(told) == len(prompt) - first
        exact = oracle.logits(prompt).log_softmax(dim=-1)
        for index, one in enumerate(told, start=first):
            place = exact[index - 1 + shift]
            assert len(one.top) == min(asked.prompt_logprobs, len(place))
            errors += errors_of(one, prompt[index], place)
    return max(errors)


@pytest.mark.parametrize(
    ("sizes", "runs_ahead"),
    [
        ({}, True),
        ({"max_scored_tokens": 3}, False),
        ({"max_num_batched_tokens": 11, "long_prefill_token_threshold": 4}, True),
        ({"num_blocks": 18, "enable_prefix_caching": False}, False),
    ],
    ids=str,
)
def test_what_is_said_of_a_prompt_is_what_transformers_says(subject, sizes, runs_ahead):
    runner, oracle = subject
    runner._runs_ahead = runs_ahead
    try:
        found = generate(runner, requests(), **sizes)
    finally:
        runner._runs_ahead = False
    assert largest_error(oracle, found) < TOLERANCE
    # The control: what is said of the place behind.
    assert largest_error(oracle, found, shift=1) > 10 * TOLERANCE
    plain = requests(asked=[without_prompt(sampling) for sampling in ASKED])
    assert generate(runner, plain, **sizes).tokens == found.tokens


def test_of_a_resumed_request_nothing_is_said_again(subject):
    runner, _ = subject
    assert generate(runner, requests(published=[50, 51])).prompt_logprobs == {}


def test_the_likelihood_of_a_continuation_is_that_of_its_tokens(subject):
    runner, oracle = subject
    beginning = make_prompt(22)
    ends = [make_prompt(length, salt=length) for length in (1, 2, 5)]
    asked = []
    for end in ends:
        asked.append(
            make_request(
                str(len(asked)),
                [*beginning, *end],
                prompt_logprobs=0,
                prompt_logprobs_from=len(beginning),
            )
        )
        asked[-1].pooling = Pooling()
    generate(runner, asked[:1], asked[1:])
    assert [one.num_cached_tokens for one in asked] == [0, 20, 20]
    for request, end in zip(asked, ends, strict=True):
        assert request.finish_reason is FinishReason.POOLED and request.output_token_ids == []
        exact = oracle.logits(request.prompt_token_ids).log_softmax(dim=-1)
        wanted = [
            exact[len(beginning) - 1 + index, token].item() for index, token in enumerate(end)
        ]
        assert request.vector.tolist() == pytest.approx(wanted, abs=TOLERANCE)


def test_a_prompt_whose_logits_are_no_numbers_fails_alone(model_folder):
    runner = make_runner(model_folder("llama"))
    runner.model.embedding[200] = torch.nan
    engine = engine_over(runner)
    good = make_request("good", make_prompt(9), max_tokens=2, prompt_logprobs=1)
    bad = make_request("bad", [5, 200, 7, 8, 9], max_tokens=2, prompt_logprobs=1)
    for request in (good, bad):
        engine.add_request(request)
    told = {}
    while engine.has_work():
        for output in engine.step(lambda: 0.0):
            told.setdefault(output.request_id, []).append(output)
    assert bad.finish_reason is FinishReason.ERROR and not told["bad"][0].prompt_logprobs
    assert good.finish_reason is FinishReason.LENGTH
    assert len(told["good"][0].prompt_logprobs) == 8


def test_only_one_number_that_is_none_is_enough():
    logits = torch.zeros(3, 8)
    logits[1, 4] = math.nan
    rows = [
        make_row([1, 2, 3], request_id="a", prompt_logprobs=0),
        make_row([1, 2], request_id="b", prompt_logprobs=2),
    ]
    assert [list(row.scored) for row in rows] == [[1, 2], [1]]
    found, failures = PromptLikelihoods(logits, rows).wait()
    assert list(failures) == ["a"]
    assert [one.logprob for one in found["b"]] == [pytest.approx(-math.log(8))]
