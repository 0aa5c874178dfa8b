"""The sampler against the parameters' definitions, written out token by token."""

import math

import numpy as np
import pytest
import torch

from engine.batch import BatchRow
from engine.model.causal_model import BROKEN
from engine.model.sampling import sampler
from engine.model.sampling.noise import gumbel, noise_keys
from tests.engine.model.builders import Chooser, make_row

VOCABULARY = 300
EOS = frozenset({7, 9})


def make_logits(rows: int, *, spread: float = 3.0, seed: int = 0, vocabulary: int = VOCABULARY):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def token_by_definition(logits: torch.Tensor, row: BatchRow, eos: frozenset[int] = EOS) -> int:
    """One row at a time over the whole vocabulary, in double precision, sorting everything."""
    sampling = row.sampling
    scores = logits.double().numpy().copy()
    if sampling.allowed_token_ids:
        forbidden = np.setdiff1d(np.arange(len(scores)), sampling.allowed_token_ids)
        scores[forbidden] = -np.inf
    if len(row.output_token_ids) < sampling.min_tokens:
        scores[list(eos | set(sampling.stop_token_ids))] = -np.inf
    for token, bias in sampling.logit_bias:
        scores[token] += np.float32(bias)
    for token in {*row.prompt_token_ids, *row.output_token_ids}:
        factor = sampling.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(row.output_token_ids):
        count = list(row.output_token_ids).count(token)
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    if sampling.is_greedy:
        return int(scores.argmax())
    scores /= sampling.temperature
    if sampling.min_p:
        scores[scores < scores.max() + math.log(sampling.min_p)] = -np.inf
    order = np.argsort(-scores, kind="stable")
    if sampling.top_k:
        worst = scores[order[min(sampling.top_k, len(order)) - 1]]
        scores[scores < worst] = -np.inf
    if sampling.top_p < 1:
        weights = np.exp(scores[order] - scores.max())
        weights /= weights.sum()
        before = np.cumsum(weights) - weights
        last = order[np.flatnonzero(before < sampling.top_p)[-1]]
        scores[scores < scores[last]] = -np.inf
    key = torch.from_numpy(noise_keys([(sampling.seed, len(row.output_token_ids))]))
    noise = gumbel(torch.arange(len(scores), dtype=torch.int32), key)[0].numpy()
    return int((scores + noise).argmax())


PARAMETERS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 2.0, "top_k": 100},
    {"temperature": 1.0, "top_k": 10_000},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 3.0, "top_p": 0.99},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "min_p": 1.0},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.8},
    {"temperature": 0.0, "repetition_penalty": 1.8, "presence_penalty": 2.0},
    {"temperature": 1.0, "frequency_penalty": 1.5, "top_p": 0.9},
    {"temperature": 1.0, "presence_penalty": -2.0, "frequency_penalty": -0.5},
    {"temperature": 0.0, "min_tokens": 30, "stop_token_ids": (3, 4)},
    {"temperature": 1.0, "min_tokens": 30, "top_k": 8},
    {"temperature": 0.0, "allowed_token_ids": (17, 4, 17, 30)},
    {"temperature": 1.0, "allowed_token_ids": (4, 7, 8), "min_tokens": 30, "top_p": 0.9},
    {"temperature": 0.0, "logit_bias": ((11, 40.0), (12, -3.0))},
    {"temperature": 1.5, "logit_bias": ((11, 5.0), (3, -100.0)), "repetition_penalty": 1.3},
    {"temperature": 1.0, "allowed_token_ids": (5, 6), "logit_bias": ((5, 2.0), (60, 100.0))},
]


def make_rows(seed: int) -> list[BatchRow]:
    random = np.random.default_rng(seed)
    return [
        make_row(
            random.integers(0, VOCABULARY, 20).tolist(),
            request_id=str(index),
            output=random.integers(0, 40, index).tolist(),
            seed=seed * 100 + index,
            **parameters,
        )
        for index, parameters in enumerate(PARAMETERS)
    ]


@pytest.mark.parametrize("max_candidates", [1, 4, 32, VOCABULARY, 256])
@pytest.mark.parametrize("seed", range(6))
def test_every_row_of_a_mixed_batch_gets_the_token_of_the_definition(max_candidates, seed):
    rows = make_rows(seed)
    logits = make_logits(len(rows), seed=seed)
    expected = [token_by_definition(*pair) for pair in zip(logits, rows, strict=True)]
    assert Chooser(EOS, max_candidates=max_candidates).sample(logits, rows) == expected


@pytest.mark.parametrize("seed", range(4))
def test_ties_are_kept_together_whether_candidates_or_the_vocabulary_decide(seed):
    rows = make_rows(seed)
    # A few distinct values for the whole vocabulary: the cuts fall inside long ties.
    logits = make_logits(len(rows), seed=seed, spread=1.0).round()
    expected = [token_by_definition(*pair) for pair in zip(logits, rows, strict=True)]
    for max_candidates in (2, 30, VOCABULARY):
        sampler = Chooser(EOS, max_candidates=max_candidates)
        assert sampler.sample(logits.clone(), rows) == expected


def test_a_row_s_token_is_the_same_alone_and_in_any_batch():
    rows = make_rows(1)
    logits = make_logits(len(rows), seed=1)
    sampler = Chooser(EOS, max_candidates=16)
    together = sampler.sample(logits.clone(), rows)
    for index, row in enumerate(rows):
        assert (
            sampler.sample(logits[index : index + 1].clone(), [row]) == together[index : index + 1]
        )
    backwards = sampler.sample(logits.flip(0), rows[::-1])
    assert backwards[::-1] == together


def test_how_many_rows_are_drawn_at_once_changes_nothing(monkeypatch):
    rows = make_rows(3)
    logits = make_logits(len(rows), seed=3)
    together = Chooser(EOS).sample(logits.clone(), rows)
    monkeypatch.setattr("engine.model.sampling.sampler.CPU_NOISE_BYTES", 1)
    assert Chooser(EOS).sample(logits, rows) == together


def test_draws_that_candidates_cannot_decide_are_settled_together(monkeypatch):
    """On a device, each draw by itself would be a sort and a wait of its own."""
    rows = [make_row(temperature=3.0, top_p=0.99, seed=n) for n in range(40)]
    logits = make_logits(len(rows), spread=0.1)
    expected = [token_by_definition(*pair) for pair in zip(logits, rows, strict=True)]
    counts = []
    draw_whole = sampler._draw_whole

    def counted(scaled, some, keys):
        counts.append(len(some))
        return draw_whole(scaled, some, keys)

    monkeypatch.setattr(sampler, "_draw_whole", counted)
    monkeypatch.setattr(sampler, "CPU_NOISE_BYTES", 30 * VOCABULARY * 8)
    assert Chooser(EOS, max_candidates=4).sample(logits, rows) == expected
    assert counts == [30, 10]


def test_the_token_depends_on_the_seed_and_the_output_index():
    logits = make_logits(1).expand(200, -1)
    sampler = Chooser(EOS)
    by_seed = sampler.sample(
        logits.clone(), [make_row(temperature=1.0, seed=n) for n in range(200)]
    )
    by_index = sampler.sample(
        logits.clone(), [make_row(output=[1] * n, temperature=1.0) for n in range(200)]
    )
    assert len(set(by_seed)) > 10
    assert len(set(by_index)) > 10


def test_sampled_tokens_follow_the_truncated_distribution():
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -1.0]).log_softmax(dim=0)
    count = 20_000
    rows = [make_row(temperature=1.0, top_k=4, seed=n) for n in range(count)]
    tokens = Chooser(frozenset()).sample(logits.repeat(count, 1), rows)
    found = torch.bincount(torch.tensor(tokens), minlength=6)
    expected = torch.softmax(logits[:4], dim=0) * count
    assert not found[4:].any()
    chi_square = float(((found[:4] - expected) ** 2 / expected).sum())
    # 3 degrees of freedom, one in a thousand.
    assert chi_square < 16.3


@pytest.mark.parametrize(
    ("parameters", "survivors"),
    [
        ({"top_p": 0.4999}, {0}),
        ({"top_p": 0.5001}, {0, 1}),
        ({"top_p": 0.7999}, {0, 1}),
        ({"top_p": 0.8001}, {0, 1, 2}),
        ({"top_p": 0.9501}, {0, 1, 2, 3}),
        # Shares of what top_k and min_p left, not of the whole.
        ({"top_p": 0.62, "top_k": 2}, {0}),
        ({"top_p": 0.63, "top_k": 2}, {0, 1}),
        ({"top_p": 0.62, "min_p": 0.59}, {0}),
        ({"min_p": 0.59}, {0, 1}),
        ({"min_p": 0.61}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("max_candidates", [4, 256])
def test_exactly_the_survivors_are_ever_drawn(parameters, survivors, max_candidates):
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05] + [1e-9] * 10]).log()
    rows = [make_row(temperature=1.0, seed=n, **parameters) for n in range(400)]
    sampler = Chooser(frozenset(), max_candidates=max_candidates)
    assert set(sampler.sample(logits.repeat(len(rows), 1), rows)) == survivors


def test_ignore_eos_does_not_lift_the_ban_of_min_tokens():
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 7] = 5.0
    logits[0, 50] = 1.0
    row = make_row(min_tokens=3, ignore_eos=True)
    assert Chooser(EOS).sample(logits, [row]) == [50]


def test_a_stop_token_outside_the_vocabulary_bans_nothing():
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 50] = 1.0
    row = make_row(min_tokens=3, stop_token_ids=(VOCABULARY + 5,))
    assert Chooser(frozenset({VOCABULARY})).sample(logits, [row]) == [50]


@pytest.mark.parametrize("temperature", [1e-40, 1e-20, 1e-6, 1e6])
def test_no_temperature_is_too_small_or_too_large(temperature):
    logits = make_logits(1, spread=40.0)
    row = make_row(temperature=temperature)
    (token,) = Chooser(EOS).sample(logits.clone(), [row])
    assert 0 <= token < VOCABULARY
    if temperature < 1:
        assert token == int(logits.argmax())


def test_low_precision_logits_are_sampled_in_single_precision():
    rows = make_rows(2)
    logits = make_logits(len(rows), seed=2).bfloat16()
    expected = [token_by_definition(*pair) for pair in zip(logits, rows, strict=True)]
    assert Chooser(EOS, max_candidates=8).sample(logits, rows) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_logits_are_no_numbers_has_no_token_and_costs_no_other(value, temperature):
    logits = make_logits(2)
    logits[1, 4] = value
    rows = [make_row(request_id="good"), make_row(request_id="bad", temperature=temperature)]
    expected = int(logits[0].argmax())
    assert Chooser(EOS).sample(logits, rows) == [expected, BROKEN]


def test_banning_the_whole_vocabulary_leaves_a_row_without_a_token():
    rows = [make_row(min_tokens=3, stop_token_ids=tuple(range(VOCABULARY)))]
    assert Chooser(EOS).sample(make_logits(1), rows) == [BROKEN]
