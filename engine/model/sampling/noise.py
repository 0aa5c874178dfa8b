"""The sampler's randomness as a pure function of (seed, output index, token id).

It has no generator and no state: a token's noise depends neither on the batch, nor on earlier
draws, nor on the other candidates. Therefore a resumed, preempted or re-batched request gets the
same tokens as an undisturbed one.
"""

import numpy as np
import torch
from numpy.typing import NDArray

_MASK_64 = (1 << 64) - 1

#: Increment and multipliers of SplitMix64 (Steele, Lea, Flood 2014), which mixes the key on the
#: host.
_SPLITMIX_INCREMENT = 0x9E3779B97F4A7C15
_SPLITMIX_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
#: Multipliers of MurmurHash3's 32-bit finalizer (Appleby), as signed numbers for torch's int32.
MURMUR_MULTIPLIERS = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))
#: 2**32 divided by the golden ratio, rounded to an odd number: spreads consecutive token ids.
TOKEN_MULTIPLIER = 0x9E3779B1 - (1 << 32)


def noise_key(seed: int, output_index: int) -> tuple[int, int]:
    """The 64-bit key of one draw as two signed 32-bit halves; computed on the host per row."""
    mixed = _splitmix64(_splitmix64(seed & _MASK_64) ^ (output_index & _MASK_64))
    low, high = mixed & 0xFFFFFFFF, mixed >> 32
    return _signed(low), _signed(high)


def noise_keys(draws: list[tuple[int, int]]) -> NDArray[np.int32]:
    """[draws, 2] keys for (seed, output index) pairs."""
    return np.array([noise_key(*draw) for draw in draws], dtype=np.int32).reshape(-1, 2)


def gumbel(token_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of each token, [rows, tokens] float64.

    argmax(log-probability + noise) is a draw from the distribution. Double precision ensures two
    properties: the uniform value is never 0 or 1, so the noise is finite; and the last bit of a
    logarithm, which may differ between vector and scalar code, does not decide between two tokens.

    Args:
        token_ids: [rows, tokens] or [tokens], int32.
        keys: [rows, 2] int32, from `noise_keys`.
    """
    bits = _hash(token_ids, keys[:, :1], keys[:, 1:])
    uniform = (bits.to(torch.float64) + (2.0**31 + 0.5)) * 2.0**-32
    return uniform.log_().neg_().log_().neg_()


def _hash(tokens: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """[rows, tokens] int32 with uniformly distributed bits.

    MurmurHash3's finalizer over the token id, into which the two halves of the key are mixed: one
    before, one between its rounds. int32 wraps around and takes half the memory of int64. Its right
    shift is arithmetic, so the copies of the sign bit are masked off.
    """
    first, second = MURMUR_MULTIPLIERS
    bits = (tokens * TOKEN_MULTIPLIER) ^ low
    bits ^= (bits >> 16) & 0xFFFF
    bits *= first
    bits += high
    bits ^= (bits >> 13) & 0x7FFFF
    bits *= second
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def _splitmix64(value: int) -> int:
    value = (value + _SPLITMIX_INCREMENT) & _MASK_64
    first, second = _SPLITMIX_MULTIPLIERS
    value = ((value ^ (value >> 30)) * first) & _MASK_64
    value = ((value ^ (value >> 27)) * second) & _MASK_64
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
