"""Drawing from whole vocabularies as one Triton kernel. Knows no row and no parameter but one.

The noise is that of `engine.model.sampling.noise`, bit by bit, but for the last bits of logarithms.
"""

import triton
import triton.language as tl
from triton import TritonError

from engine.model.sampling.noise import MURMUR_MULTIPLIERS, TOKEN_MULTIPLIER

__all__ = ["TritonError", "draw_tiles"]

_TOKEN = tl.constexpr(TOKEN_MULTIPLIER % (1 << 32))
_FIRST = tl.constexpr(MURMUR_MULTIPLIERS[0] % (1 << 32))
_SECOND = tl.constexpr(MURMUR_MULTIPLIERS[1] % (1 << 32))
_HALF = tl.constexpr(2.0**31 + 0.5)
_UNIT = tl.constexpr(2.0**-32)


@triton.jit
def draw_tiles(
    logits, rows, best, temperatures, keys, scores, tokens, stride,
    VOCABULARY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of one drawn row: the largest of scaled logit plus noise, and its token."""
    drawn, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + drawn)
    token_ids = tile * TILE + tl.arange(0, TILE)
    valid = token_ids < VOCABULARY
    values = tl.load(logits + row * stride + token_ids, mask=valid, other=float("-inf"))
    # Rounded as torch does: the plain division of Triton is off by two units in the last place.
    scaled = tl.div_rn(values - tl.load(best + row), tl.load(temperatures + drawn))
    noise = gumbel(token_ids, tl.load(keys + 2 * drawn), tl.load(keys + 2 * drawn + 1))
    found = tl.where(valid, scaled.to(tl.float64) + noise, float("-inf"))
    highest, at = tl.max(found, 0, return_indices=True, return_indices_tie_break_left=True)
    place = drawn * tl.num_programs(1) + tile
    tl.store(scores + place, highest)
    tl.store(tokens + place, tile * TILE + at)


@triton.jit
def gumbel(token_ids, low, high):
    bits = token_ids.to(tl.uint32, bitcast=True) * _TOKEN ^ low.to(tl.uint32, bitcast=True)
    bits ^= bits >> 16
    bits *= _FIRST
    bits += high.to(tl.uint32, bitcast=True)
    bits ^= bits >> 13
    bits *= _SECOND
    bits ^= bits >> 16
    uniform = (bits.to(tl.int32, bitcast=True).to(tl.float64) + _HALF) * _UNIT
    return -tl.log(-tl.log(uniform))
