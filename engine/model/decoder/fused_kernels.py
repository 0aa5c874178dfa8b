"""Three fused Triton kernels for the operations between a decoder's products. Knows no step.

They round at the same points as torch does when it runs the operations one after the other.
"""

import triton
import triton.language as tl
from triton import TritonError

__all__ = ["TritonError", "activate", "add_and_norm", "store_heads"]


@triton.jit
def add_and_norm(
    hidden, added, weight, summed, normed, epsilon,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """One token: adds to the residual stream, and computes the RMS norm of the sum."""
    lanes = tl.arange(0, PADDED)
    valid = lanes < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + lanes
    values = tl.load(hidden + at, mask=valid, other=0.0)
    if ADDS:
        more = tl.load(added + at, mask=valid, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        tl.store(summed + at, values, mask=valid)
    wide = values.to(tl.float32)
    normal = rounded(wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon), values)
    weights = tl.load(weight + lanes, mask=valid, other=0.0)
    tl.store(normed + at, normal * weights.to(tl.float32), mask=valid)


@triton.jit
def store_heads(
    projected, query_weight, key_weight, cosines, sines, blocks, offsets,
    query, key_cache, value_cache, epsilon, block_stride, offset_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr, PADDED_REST: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NORMS: tl.constexpr, ROTATES: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: norm, rotation, and a write to the queries or to a cache slot.

    A head is the two halves that rotation combines, and the rest. Each is consecutive in memory, so
    that a thread reads and writes sixteen bytes at once.
    """
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # Groups of queries come first, then those of keys, then those of values.
    query_groups: tl.constexpr = (HEADS + AT_ONCE - 1) // AT_ONCE
    kv_groups: tl.constexpr = (KV_HEADS + AT_ONCE - 1) // AT_ONCE
    is_query, is_value = group < query_groups, group >= query_groups + kv_groups
    own = tl.where(is_query, group, (group - query_groups) % kv_groups) * AT_ONCE
    own += tl.arange(0, AT_ONCE)
    before = tl.where(is_query, 0, tl.where(is_value, HEADS + KV_HEADS, HEADS))
    heads = projected + (token * (HEADS + 2 * KV_HEADS) + before + own)[:, None] * DIM
    exists = (own < tl.where(is_query, HEADS, KV_HEADS))[:, None]
    lanes, others = tl.arange(0, PADDED_HALF)[None, :], tl.arange(0, PADDED_REST)[None, :]
    valid, valid_other = lanes < HALF, others < DIM - 2 * HALF
    first = tl.load(heads + lanes, mask=exists & valid, other=0.0)
    second = tl.load(heads + HALF + lanes, mask=exists & valid, other=0.0)
    rest = tl.load(heads + 2 * HALF + others, mask=exists & valid_other, other=0.0)
    if not is_value:
        if NORMS:
            weights = tl.where(is_query, query_weight, key_weight)
            squares = sum_of_squares(first) + sum_of_squares(second) + sum_of_squares(rest)
            factor = tl.rsqrt(squares / DIM + epsilon)[:, None]
            first = weighted(first, factor, weights + lanes, valid)
            second = weighted(second, factor, weights + HALF + lanes, valid)
            rest = weighted(rest, factor, weights + 2 * HALF + others, valid_other)
        if ROTATES:
            angles = token * HALF + lanes
            cosine = tl.load(cosines + angles, mask=valid, other=0.0).to(tl.float32)
            sine = tl.load(sines + angles, mask=valid, other=0.0).to(tl.float32)
            one, other = first.to(tl.float32), second.to(tl.float32)
            first = (rounded(one * cosine, first) - rounded(other * sine, first)).to(first.dtype)
            second = (rounded(other * cosine, first) + rounded(one * sine, first)).to(first.dtype)
    block = tl.load(blocks + token * block_stride).to(tl.int64)
    slot = (block * KV_HEADS + own) * BLOCK_SIZE + tl.load(offsets + token * offset_stride)
    to = tl.where(is_query, query, tl.where(is_value, value_cache, key_cache))
    to += tl.where(is_query, token * HEADS + own, slot)[:, None] * DIM
    tl.store(to + lanes, first, mask=exists & valid)
    tl.store(to + HALF + lanes, second, mask=exists & valid)
    tl.store(to + 2 * HALF + others, rest, mask=exists & valid_other)


@triton.jit
def sum_of_squares(values):
    wide = values.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def weighted(values, factor, weights, valid):
    """The norm of some heads, rounded before and after the weights multiply."""
    normal = rounded(values.to(tl.float32) * factor, values)
    return (normal * tl.load(weights, mask=valid, other=0.0).to(tl.float32)).to(values.dtype)


@triton.jit
def activate(gate_up, output, SIZE: tl.constexpr, TILE: tl.constexpr):
    """One tile of one token: SiLU of the gates, times the ups."""
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * TILE + tl.arange(0, TILE)
    valid = lanes < SIZE
    gates = tl.load(gate_up + 2 * token * SIZE + lanes, mask=valid, other=0.0)
    ups = tl.load(gate_up + (2 * token + 1) * SIZE + lanes, mask=valid, other=0.0)
    wide = gates.to(tl.float32)
    active = rounded(wide / (1.0 + tl.exp(-wide)), gates)
    tl.store(output + token * SIZE + lanes, active * ups.to(tl.float32), mask=valid)


@triton.jit
def rounded(wide, like):
    """Round to the type of `like`, and return it as float32."""
    return wide.to(like.dtype).to(tl.float32)
