"""What stands between a decoder's products, as three Triton kernels. Knows no step and no model.

They round where torch rounds that does one operation after the other.
"""

import triton
import triton.language as tl
from triton import TritonError

__all__ = ["TritonError", "activate", "add_and_norm", "place_heads"]


@triton.jit
def add_and_norm(
    hidden, added, weight, summed, normed, epsilon,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """One token: what goes on to the next layers, and its root mean square norm."""
    lanes = tl.arange(0, PADDED)
    real = lanes < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + lanes
    values = tl.load(hidden + at, mask=real, other=0.0)
    if ADDS:
        more = tl.load(added + at, mask=real, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        tl.store(summed + at, values, mask=real)
    normal = rounded_norm(values, epsilon, SIZE)
    weights = tl.load(weight + lanes, mask=real, other=0.0)
    tl.store(normed + at, normal * weights.to(tl.float32), mask=real)


@triton.jit
def place_heads(
    projected, query_weight, key_weight, cosines, sines, blocks, offsets,
    query, key_cache, value_cache, epsilon, block_stride, offset_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORMS: tl.constexpr, ROTATES: tl.constexpr,
):  # fmt: skip
    """One head of one token, normed and rotated, as a query or in its slot of a cache."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, PADDED)
    real = lanes < DIM
    base = (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    values = tl.load(projected + base + lanes, mask=real, other=0.0)
    if head < HEADS + KV_HEADS:
        # What a lane is rotated with is loaded, and normed, a second time.
        others = tl.where(lanes < HALF, lanes + HALF, lanes - HALF)
        turns = lanes < 2 * HALF
        partners = tl.load(projected + base + others, mask=turns, other=0.0)
        if NORMS:
            if head < HEADS:
                weights = tl.load(query_weight + lanes, mask=real, other=0.0)
                weights_there = tl.load(query_weight + others, mask=turns, other=0.0)
            else:
                weights = tl.load(key_weight + lanes, mask=real, other=0.0)
                weights_there = tl.load(key_weight + others, mask=turns, other=0.0)
            factor = norm_factor(values, epsilon, DIM)
            partners = rounded(partners.to(tl.float32) * factor, partners)
            partners = (partners * weights_there.to(tl.float32)).to(values.dtype)
            normal = rounded_norm(values, epsilon, DIM)
            values = (normal * weights.to(tl.float32)).to(values.dtype)
        if ROTATES:
            angles = token * HALF + lanes % HALF
            cosine = tl.load(cosines + angles, mask=turns, other=0.0).to(tl.float32)
            sine = tl.load(sines + angles, mask=turns, other=0.0).to(tl.float32)
            along = rounded(values.to(tl.float32) * cosine, values)
            across = rounded(partners.to(tl.float32) * sine, values)
            turned = tl.where(lanes < HALF, along - across, along + across).to(values.dtype)
            values = tl.where(turns, turned, values)
    if head < HEADS:
        tl.store(query + (token * HEADS + head) * DIM + lanes, values, mask=real)
    else:
        block = tl.load(blocks + token * block_stride).to(tl.int64)
        offset = tl.load(offsets + token * offset_stride)
        kv_head = (head - HEADS) % KV_HEADS
        slot = (block * KV_HEADS + kv_head) * BLOCK_SIZE + offset
        if head < HEADS + KV_HEADS:
            tl.store(key_cache + slot * DIM + lanes, values, mask=real)
        else:
            tl.store(value_cache + slot * DIM + lanes, values, mask=real)


@triton.jit
def activate(gate_up, output, SIZE: tl.constexpr, TILE: tl.constexpr):
    """A run of one token: SiLU of the gates, times the ups."""
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = lanes < SIZE
    gates = tl.load(gate_up + 2 * token * SIZE + lanes, mask=real, other=0.0)
    ups = tl.load(gate_up + (2 * token + 1) * SIZE + lanes, mask=real, other=0.0)
    wide = gates.to(tl.float32)
    active = rounded(wide / (1.0 + tl.exp(-wide)), gates)
    tl.store(output + token * SIZE + lanes, active * ups.to(tl.float32), mask=real)


@triton.jit
def rounded_norm(values, epsilon, SIZE: tl.constexpr):
    return rounded(values.to(tl.float32) * norm_factor(values, epsilon, SIZE), values)


@triton.jit
def norm_factor(values, epsilon, SIZE: tl.constexpr):
    wide = values.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)


@triton.jit
def rounded(wide, like):
    """As a number of the type of `like`, in single precision again."""
    return wide.to(like.dtype).to(tl.float32)
