"""The 8-bit form of keys and values: integers with a scale for each token and key head.

Knows no pool and no attention. The scale is the largest magnitude of the head's numbers divided by
127, so a stored number differs from the computed one by at most half a scale. What is stored for a
token is a function of that token's key and value alone.
"""

import torch

#: The type by which a cache of this form is recognised.
QUANTIZED = torch.int8
SCALE_BYTES = torch.float32.itemsize
#: LARGEST_INTEGER and SMALLEST_MAGNITUDE in kernels/cache.h.
LARGEST_INTEGER = 127.0
SMALLEST_MAGNITUDE = 1e-30


def slot_bytes(dim: int) -> int:
    """Bytes of one key or value of `dim` numbers, with its scale."""
    assert dim % SCALE_BYTES == 0, "scales would not be aligned"
    return dim + SCALE_BYTES


def integers_of(cache: torch.Tensor, block_size: int) -> torch.Tensor:
    """[blocks, kv_heads, block_size, dim], a view of [blocks, kv_heads, bytes].

    The part of a head in a block has the integers of all slots, and then their scales.
    """
    dim = cache.shape[-1] // block_size - SCALE_BYTES
    return cache[..., : block_size * dim].view(*cache.shape[:-1], block_size, dim)


def scales_of(cache: torch.Tensor, block_size: int) -> torch.Tensor:
    """[blocks, kv_heads, block_size] in float32, a view of [blocks, kv_heads, bytes]."""
    return cache[..., -block_size * SCALE_BYTES :].view(torch.float32)


def quantize(heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers [..., dim] and scales [...] of keys or values [..., dim].

    If a number is not finite, the scale is NaN, so that the token's row is noticed as broken.
    """
    numbers = heads.float()
    magnitudes = numbers.abs().amax(dim=-1)
    factors = torch.where(magnitudes > SMALLEST_MAGNITUDE, LARGEST_INTEGER / magnitudes, 0.0)
    integers = (numbers * factors.unsqueeze(-1)).round().nan_to_num(0.0)
    scales = magnitudes / LARGEST_INTEGER + magnitudes * 0.0
    return integers.to(QUANTIZED), scales


def dequantize(cache: torch.Tensor, block_size: int, dtype: torch.dtype) -> torch.Tensor:
    """[blocks, kv_heads, block_size, dim] in `dtype` from [blocks, kv_heads, bytes]."""
    scales = scales_of(cache, block_size).unsqueeze(-1)
    return (integers_of(cache, block_size) * scales).to(dtype)
