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
    normal = rounded_norm(values, epsilon, SIZE)
    weights = tl.load(weight + lanes, mask=valid, other=0.0)
    tl.store(normed + at, normal * weights.to(tl.float32), mask=valid)


@triton.jit
def store_heads(
    projected, query_weight, key_weight, cosines, sines, blocks, offsets,
    query, key_cache, value_cache, epsilon, block_stride, offset_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORMS: tl.constexpr, ROTATES: tl.constexpr,
):  # fmt: skip
    """One head of one token: norm, rotation, and a write to the queries or to a cache slot."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, PADDED)
    valid = lanes < DIM
    base = (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    values = tl.load(projected + base + lanes, mask=valid, other=0.0)
    if head < HEADS + KV_HEADS:
        # Each lane also loads and norms its partner of the rotation pair, instead of exchanging
        # lanes.
        others = tl.where(lanes < HALF, lanes + HALF, lanes - HALF)
        in_pair = lanes < 2 * HALF
        partners = tl.load(projected + base + others, mask=in_pair, other=0.0)
        if NORMS:
            if head < HEADS:
                weights = tl.load(query_weight + lanes, mask=valid, other=0.0)
                partner_weights = tl.load(query_weight + others, mask=in_pair, other=0.0)
            else:
                weights = tl.load(key_weight + lanes, mask=valid, other=0.0)
                partner_weights = tl.load(key_weight + others, mask=in_pair, other=0.0)
            factor = norm_factor(values, epsilon, DIM)
            partners = rounded(partners.to(tl.float32) * factor, partners)
            partners = (partners * partner_weights.to(tl.float32)).to(values.dtype)
            normal = rounded_norm(values, epsilon, DIM)
            values = (normal * weights.to(tl.float32)).to(values.dtype)
        if ROTATES:
            angles = token * HALF + lanes % HALF
            cosine = tl.load(cosines + angles, mask=in_pair, other=0.0).to(tl.float32)
            sine = tl.load(sines + angles, mask=in_pair, other=0.0).to(tl.float32)
            along = rounded(values.to(tl.float32) * cosine, values)
            across = rounded(partners.to(tl.float32) * sine, values)
            rotated = tl.where(lanes < HALF, along - across, along + across).to(values.dtype)
            values = tl.where(in_pair, rotated, values)
    if head < HEADS:
        tl.store(query + (token * HEADS + head) * DIM + lanes, values, mask=valid)
    else:
        block = tl.load(blocks + token * block_stride).to(tl.int64)
        offset = tl.load(offsets + token * offset_stride)
        kv_head = (head - HEADS) % KV_HEADS
        slot = (block * KV_HEADS + kv_head) * BLOCK_SIZE + offset
        if head < HEADS + KV_HEADS:
            tl.store(key_cache + slot * DIM + lanes, values, mask=valid)
        else:
            tl.store(value_cache + slot * DIM + lanes, values, mask=valid)


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
def rounded_norm(values, epsilon, SIZE: tl.constexpr):
    return rounded(values.to(tl.float32) * norm_factor(values, epsilon, SIZE), values)


@triton.jit
def norm_factor(values, epsilon, SIZE: tl.constexpr):
    wide = values.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)


@triton.jit
def rounded(wide, like):
    """Round to the type of `like`, and return it as float32."""
    return wide.to(like.dtype).to(tl.float32)
