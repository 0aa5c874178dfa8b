"""The noise is a pure function of (seed, output index, token id), and good enough to draw with."""

import math

import numpy as np
import pytest
import torch

from engine.model.sampling.noise import gumbel, noise_key, noise_keys

MASK_32 = (1 << 32) - 1

# For (seed 0, output 0) and (seed 42, output 7), tokens 0 to 3.
RECORDED = [
    [0.388352156, 0.505295655, 0.313301448, -0.033892853],
    [-0.578732316, 0.344493756, -0.677833624, -0.827688908],
]


def hash_by_hand(token: int, low: int, high: int) -> int:
    """The token's 32 random bits in unbounded integers, step by step."""
    bits = (token * 0x9E3779B1 & MASK_32) ^ (low & MASK_32)
    bits ^= bits >> 16
    bits = bits * 0x85EBCA6B & MASK_32
    bits = (bits + high) & MASK_32
    bits ^= bits >> 13
    bits = bits * 0xC2B2AE35 & MASK_32
    return bits ^ bits >> 16


def noise_of(draws: list[tuple[int, int]], num_tokens: int) -> torch.Tensor:
    return gumbel(torch.arange(num_tokens, dtype=torch.int32), torch.from_numpy(noise_keys(draws)))


@pytest.mark.parametrize("draw", [(0, 0), (1, 0), (0, 1), (2**63 - 1, 10**6), (-1, 3)])
def test_the_noise_is_the_written_formula_on_every_token(draw):
    tokens = [0, 1, 2, 77, 152_000, 2**31 - 1]
    low, high = noise_key(*draw)
    expected = []
    for token in tokens:
        bits = hash_by_hand(token, low, high)
        # The tensor code counts from the middle: the top bit is flipped by adding half the range.
        uniform = ((bits ^ (1 << 31)) + 0.5) / 2**32
        expected.append(-math.log(-math.log(uniform)))
    found = gumbel(torch.tensor(tokens, dtype=torch.int32), torch.from_numpy(noise_keys([draw])))
    assert found[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_recorded_noise_never_changes_or_resumed_requests_would_leave_their_path():
    found = noise_of([(0, 0), (42, 7)], 4)
    assert [[round(value, 9) for value in row] for row in found.tolist()] == RECORDED


def test_a_row_s_noise_depends_on_no_other_row_and_no_other_token():
    draws = [(seed, index) for seed in (3, 4) for index in (0, 1, 9)]
    together = noise_of(draws, 1000)
    for position, draw in enumerate(draws):
        assert torch.equal(noise_of([draw], 1000)[0], together[position])
    some = torch.tensor([[999, 5, 123]], dtype=torch.int32)
    alone = gumbel(some, torch.from_numpy(noise_keys(draws[:1])))
    assert torch.equal(alone[0], together[0, [999, 5, 123]])


def test_neighbouring_seeds_indices_and_tokens_are_unrelated():
    base, next_seed, next_index = (
        row.numpy() for row in noise_of([(5, 5), (6, 5), (5, 6)], 50_000)
    )
    for left, right in (
        (base, next_seed),
        (base, next_index),
        (next_seed, next_index),
        (base[1:], base[:-1]),
        (base[2:], base[:-2]),
    ):
        assert abs(np.corrcoef(left, right)[0, 1]) < 4 / math.sqrt(len(left))


def test_noise_is_always_finite_with_the_mean_and_spread_of_a_gumbel_variable():
    noise = noise_of([(seed, 0) for seed in range(20)], 50_000)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772156649, abs=0.006)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)


@pytest.mark.parametrize("varied", ["seed", "output index"])
def test_draws_follow_the_distribution(varied):
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005])
    count = 40_000
    draws = [(n, 0) if varied == "seed" else (11, n) for n in range(count)]
    scores = noise_of(draws, len(probabilities)) + probabilities.log()
    found = torch.bincount(scores.argmax(dim=-1), minlength=len(probabilities))
    expected = probabilities * count
    chi_square = float(((found - expected) ** 2 / expected).sum())
    # 7 degrees of freedom: one in a thousand honest samplers exceeds 24.3, and the seeds are fixed.
    assert chi_square < 24.3
