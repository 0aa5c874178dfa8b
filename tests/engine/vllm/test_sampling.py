"""What a step has drawn is told when its tokens arrive: wrong guesses and failed rows."""

import math

import pytest
import torch

from engine.model.causal_model import BROKEN
from engine.model.sampling.sampler import Sampler, guess_of
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.vllm.row import NOTHING_TO_SAY, Row
from engine.vllm.sampling import EOS_KEY, REPORT, DrawnStep, RowSampler, attach_report

VOCAB = 60


def rows(number: int, **sampling) -> list[Row]:
    return [
        Row(Request(f"{seed}", [1], SamplingParams(max_tokens=4, seed=seed, **sampling), 0.0))
        for seed in range(number)
    ]


def logits(number: int) -> torch.Tensor:
    return torch.randn(number, VOCAB, generator=torch.Generator().manual_seed(3))


def test_a_wrong_guess_is_told_with_its_token_and_a_right_one_is_not():
    """Flat rows, of which two candidates are looked at: some draws are among them, some are not."""
    made = rows(40, temperature=1.0, top_p=0.99)
    expected = Sampler(frozenset()).draw(logits(40), made).tokens.tolist()
    draws = Sampler(frozenset(), max_candidates=2).draw(logits(40), made)
    guesses = draws.guesses().tolist()
    assert guesses == [guess_of(token) for token in draws.tokens.tolist()]
    tokens, wrong, report = DrawnStep(made, draws).wait()
    assert tokens == expected
    assert wrong == {at: token for at, token in enumerate(expected) if token != guesses[at]}
    assert 0 < len(wrong) < 40
    assert report == NOTHING_TO_SAY
    best = logits(40).topk(2).indices.tolist()
    assert all(guess in of_row for guess, of_row in zip(guesses, best, strict=True))


def test_a_row_without_a_token_is_broken_and_its_guess_is_in_the_vocabulary():
    made, values = rows(2), logits(2)
    values[1] = math.nan
    draws = Sampler(frozenset()).draw(values, made)
    assert draws.guesses().tolist() == [draws.tokens[0].item(), 0]
    tokens, wrong, report = DrawnStep(made, draws).wait()
    assert (tokens[1], wrong, report.broken) == (BROKEN, {}, {"1"})


def test_log_probabilities_are_those_of_the_token_and_not_of_a_wrong_guess():
    made = rows(40, temperature=1.0, top_p=0.99, logprobs=0)
    draws = Sampler(frozenset(), max_candidates=2).draw(logits(40), made)
    tokens, wrong, report = DrawnStep(made, draws).wait()
    expected = logits(40).log_softmax(dim=-1)
    assert wrong
    for at, row in enumerate(made):
        found = report.told[row.request_id].logprob
        assert found == pytest.approx(expected[at, tokens[at]].item(), abs=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.0, "min_tokens": 3},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "logprobs": 2},
        {"temperature": 0.0, "logit_bias": ((5, 3.0),), "allowed_token_ids": (4, 5)},
        {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    ],
)
def test_drawing_reads_nothing_from_the_device(sampling):
    """A tensor of the device `meta` has no numbers: to read one raises an error."""
    sampler = RowSampler({EOS_KEY: [2]})
    made = rows(3, **sampling)
    draws = sampler._draw(torch.empty(3, VOCAB, device="meta"), made)
    assert draws.guesses().shape == (3,)
    drawn = DrawnStep(made, draws)
    with pytest.raises(NotImplementedError):
        drawn.wait()


def test_nothing_is_attached_where_nothing_is_to_be_said():
    class Output:
        pass

    output = Output()
    attach_report(output, NOTHING_TO_SAY, {})
    assert not hasattr(output, REPORT)
