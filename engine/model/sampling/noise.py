"""The sampler's randomness as a pure function of (seed, output index, token id).

Knows no generator and no state: a token's noise does not depend on the batch it is drawn in, on
what was drawn before, nor on which other tokens are candidates. That is what makes a resumed,
preempted or re-batched request go on as if nothing had happened.
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
_MURMUR_MULTIPLIERS = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))
#: 2**32 divided by the golden ratio, odd: spreads neighbouring token ids.
_TOKEN_MULTIPLIER = 0x9E3779B1 - (1 << 32)


def noise_key(seed: int, output_index: int) -> tuple[int, int]:
    """Two signed 32-bit halves of a 64-bit key for one draw; host arithmetic, once per row."""
    mixed = _splitmix64(_splitmix64(seed & _MASK_64) ^ (output_index & _MASK_64))
    low, high = mixed & 0xFFFFFFFF, mixed >> 32
    return _signed(low), _signed(high)


def noise_keys(draws: list[tuple[int, int]]) -> NDArray[np.int32]:
    """[draws, 2] keys for (seed, output index) pairs."""
    return np.array([noise_key(*draw) for draw in draws], dtype=np.int32).reshape(-1, 2)


def gumbel(token_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of each token, [rows, tokens] float64.

    argmax(log-probability + noise) is a draw from the distribution. Double precision keeps two
    properties beyond doubt: the uniform is never 0 or 1, so the noise is finite, and the last bit
    of a logarithm, which may differ between vector and scalar code, cannot decide between two
    tokens.

    Args:
        token_ids: [rows, tokens] or [tokens], int32.
        keys: [rows, 2] int32, from `noise_keys`.
    """
    bits = _hash(token_ids, keys[:, :1], keys[:, 1:])
    uniform = (bits.to(torch.float64) + (2.0**31 + 0.5)) * 2.0**-32
    return uniform.log_().neg_().log_().neg_()


def _hash(tokens: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """[rows, tokens] int32 of uniformly distributed bits.

    MurmurHash3's finalizer over the token with the key's halves put in at two places. int32 wraps
    and takes half the memory of int64; its shift is arithmetic, so the copied sign bits are masked
    off.
    """
    first, second = _MURMUR_MULTIPLIERS
    bits = (tokens * _TOKEN_MULTIPLIER) ^ low
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
