"""How likely tokens are said to be, against the softmax of the raw logits and of transformers."""

import math
from dataclasses import replace

import pytest
import torch

from engine.logprobs import Logprobs
from engine.model.causal_model import BROKEN
from engine.model.run.model_runner import ModelRunner
from engine.model.sampling.likelihoods import Likelihoods
from engine.model.sampling.sampler import Sampler
from tests.engine.model.builders import (
    ROOT,
    Oracle,
    generate,
    make_prompt,
    make_request,
    make_row,
    make_runner,
)
from tests.engine.model.sampling.test_sampler import EOS, make_logits, make_rows

ABACUS = ROOT / "models" / "abacus"
NUM_TOKENS = 10
#: Of float32 on both sides.
TOLERANCE = 1e-4


def with_logprobs(rows, numbers=(None, 0, 1, 5, 20)):
    """The same rows, asking for different numbers of tokens, some for none."""
    return [
        row._replace(sampling=replace(row.sampling, logprobs=numbers[index % len(numbers)]))
        for index, row in enumerate(rows)
    ]


def drawn(logits, rows, *, max_candidates=256):
    """The tokens and what is said of them."""
    draws = Sampler(EOS, max_candidates=max_candidates).draw(logits.clone(), rows)
    chosen = draws.tokens.tolist()
    draws.settle(chosen)
    return chosen, draws.logprobs(chosen)


@pytest.mark.parametrize("max_candidates", [1, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_said_of_a_token_is_of_the_logits_as_they_came(max_candidates, dtype):
    rows = with_logprobs(make_rows(3))
    logits = make_logits(len(rows), seed=3).to(dtype)
    chosen, found = drawn(logits, rows, max_candidates=max_candidates)
    wanted = logits.double().log_softmax(dim=-1)
    assert set(found) == {
        index for index, row in enumerate(rows) if row.sampling.logprobs is not None
    }
    for index, said in found.items():
        row, exact = rows[index], wanted[index]
        assert said.logprob == pytest.approx(exact[chosen[index]].item(), abs=1e-5)
        best = exact.sort(descending=True).values[: row.sampling.logprobs].tolist()
        assert [logprob for _, logprob in said.top] == pytest.approx(best, abs=1e-5)
        named = [exact[token_id].item() for token_id, _ in said.top]
        assert named == pytest.approx(best, abs=1e-5)
        assert len({token_id for token_id, _ in said.top}) == row.sampling.logprobs


def test_asking_changes_no_token():
    rows = make_rows(4)
    logits = make_logits(len(rows), seed=4)
    assert drawn(logits, rows)[0] == drawn(logits, with_logprobs(rows))[0]
    assert drawn(logits, rows)[1] == {}


def test_rows_that_do_not_ask_cost_no_tensor():
    assert Likelihoods.for_rows(make_logits(3), make_rows(0)[:3]) is None


def test_a_vocabulary_smaller_than_what_is_asked_for_is_told_whole():
    (found,) = drawn(make_logits(1, vocabulary=3), [make_row(logprobs=20)])[1].values()
    assert sorted(token_id for token_id, _ in found.top) == [0, 1, 2]
    assert sum(math.exp(logprob) for _, logprob in found.top) == pytest.approx(1)


def test_a_row_of_which_nothing_can_be_said_has_no_token_and_its_neighbour_has_one():
    rows = [make_row(request_id=name, logprobs=1, allowed_token_ids=(3, 4)) for name in "ab"]
    logits = make_logits(2)
    logits[0, 100] = math.nan
    chosen, found = drawn(logits, rows)
    assert (chosen[0], chosen[1] in (3, 4)) == (BROKEN, True)
    assert math.isfinite(found[1].logprob)


# -- a whole engine, against transformers ---------------------------------------------------------

SAMPLING = [
    {"logprobs": 5},
    {"logprobs": 20, "temperature": 1.5, "top_p": 0.9, "repetition_penalty": 1.3},
    {"logprobs": 0, "temperature": 1.0, "logit_bias": ((40, 30.0),)},
    {},
]


def runner_and_oracle(described: str, model_folder) -> tuple[ModelRunner, Oracle]:
    name, _, path = described.partition(" ")
    folder = ABACUS if name == "abacus" else model_folder(name)
    return make_runner(folder, model_path=path or "auto"), Oracle(folder)


@pytest.fixture(scope="module", params=["llama", "qwen3 wide", "abacus"])
def subject(request, model_folder):
    return runner_and_oracle(request.param, model_folder)


def requests(published=None):
    return [
        make_request(
            str(index),
            make_prompt(5 + 9 * index, salt=index),
            output=() if published is None else published[str(index)],
            max_tokens=NUM_TOKENS,
            seed=index,
            **sampling,
        )
        for index, sampling in enumerate(SAMPLING)
    ]


def errors_of(said: Logprobs, token_id: int, exact: torch.Tensor) -> list[float]:
    """Of what is said of a token, against the exact log-probabilities of its place."""
    numbers = [(token_id, said.logprob), *said.top]
    errors = [abs(exact[id_].item() - number) for id_, number in numbers]
    # None that is left out is better than one that is named.
    best = exact.topk(max(1, len(said.top))).values.tolist()
    return errors + [abs(b - n) for b, (_, n) in zip(best, said.top, strict=False)]


def largest_error(oracle, tokens, said: dict[str, list[Logprobs]], *, temperature=1.0, shift=0):
    """Of all numbers said, against those of transformers."""
    errors = []
    for request in requests():
        name = request.request_id
        logits = oracle.logits([*request.prompt_token_ids, *tokens[name]])
        exact = (logits / temperature).log_softmax(dim=-1)
        first = len(tokens[name]) - len(said[name])
        for index, one in enumerate(said[name], start=first):
            place = exact[request.num_prompt_tokens - 1 + index + shift]
            errors += errors_of(one, tokens[name][index], place)
    return max(errors)


def test_what_an_engine_says_is_what_transformers_says(subject):
    runner, oracle = subject
    found = generate(runner, requests())
    numbers = [len(found.logprobs[str(index)]) for index in range(len(SAMPLING))]
    assert numbers == [NUM_TOKENS] * 3 + [0]
    assert largest_error(oracle, found.tokens, found.logprobs) < TOLERANCE
    # Controls: what another temperature would say, and what is said of the place behind.
    assert largest_error(oracle, found.tokens, found.logprobs, temperature=1.1) > 10 * TOLERANCE
    assert largest_error(oracle, found.tokens, found.logprobs, shift=1) > 10 * TOLERANCE


def test_it_is_the_same_preempted_resumed_and_with_steps_in_flight(subject):
    runner, oracle = subject
    whole = generate(runner, requests())
    preempted = generate(runner, requests(), num_blocks=24, enable_prefix_caching=False)
    assert preempted.snapshot.preemptions_recompute > 0
    published = {name: tokens[:4] for name, tokens in whole.tokens.items()}
    resumed = generate(runner, requests(published))
    assert [len(resumed.logprobs[str(index)]) for index in range(3)] == [NUM_TOKENS - 4] * 3
    runner._runs_ahead, runner._sampler._max_candidates = True, 2
    try:
        ahead = generate(runner, requests())
    finally:
        runner._runs_ahead, runner._sampler._max_candidates = False, 256
    for found in (preempted, resumed, ahead):
        assert largest_error(oracle, whole.tokens, found.logprobs) < TOLERANCE
