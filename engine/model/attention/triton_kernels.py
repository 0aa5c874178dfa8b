"""Decode attention over paged keys as two Triton kernels. Knows no step and no model.

A row's keys are divided into at most NUM_SPLITS splits, which are computed in parallel and merged
by a second kernel: so a few long requests keep a whole device busy. How a row is split depends only
on its own context, so its result does not depend on other rows.
"""

import triton
import triton.language as tl
from triton import TritonError

__all__ = ["TritonError", "attend_splits", "merge_splits"]


@triton.jit
def attend_splits(
    query, key_cache, value_cache, context_lens, block_tables, sums, highest, totals,
    scaling, window, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr, MIN_SPLIT_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of one row and key head: unnormalised sums, largest score, sum of weights."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_lens + row)
    first_seen = tl.maximum(0, context - window)
    start, end = keys_of_split(first_seen, context, split, NUM_SPLITS, MIN_SPLIT_KEYS)
    if start < end:
        members, lanes = tl.arange(0, GROUP_ROWS), tl.arange(0, PADDED_DIM)
        heads = kv_head * GROUP + members
        valid = (members[:, None] < GROUP) & (lanes[None, :] < DIM)
        at = (row * HEADS + heads[:, None]) * DIM + lanes[None, :]
        queries = tl.load(query + at, mask=valid, other=0.0)
        best = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_ROWS], tl.float32)
        summed = tl.zeros([GROUP_ROWS, PADDED_DIM], tl.float32)
        for tile in range(start, end, TILE):
            positions = tile + tl.arange(0, TILE)
            visible = positions < end
            blocks = tl.load(
                block_tables + row * table_stride + positions // BLOCK_SIZE, mask=visible, other=0
            ).to(tl.int64)
            slots = (blocks * KV_HEADS + kv_head) * BLOCK_SIZE + positions % BLOCK_SIZE
            addresses = slots[:, None] * DIM + lanes[None, :]
            # Invisible slots are not read: they may contain anything, NaN included.
            readable = visible[:, None] & (lanes[None, :] < DIM)
            keys = tl.load(key_cache + addresses, mask=readable, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scaling
            scores = tl.where(visible[None, :], scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp(scores - new_best[:, None])
            decay = tl.exp(best - new_best)
            values = tl.load(value_cache + addresses, mask=readable, other=0.0)
            weighted = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
            summed = summed * decay[:, None] + weighted
            total = total * decay + tl.sum(weights, 1)
            best = new_best
        slot_index = (row * HEADS + heads) * NUM_SPLITS + split
        tl.store(sums + slot_index[:, None] * DIM + lanes[None, :], summed, mask=valid)
        tl.store(highest + slot_index, best, mask=members < GROUP)
        tl.store(totals + slot_index, total, mask=members < GROUP)


@triton.jit
def merge_splits(
    output, sums, highest, totals, context_lens, window,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr, MIN_SPLIT_KEYS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row and head; skip splits without keys, which were not written."""
    row, head = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_lens + row)
    first_seen = tl.maximum(0, context - window)
    lanes = tl.arange(0, PADDED_DIM)
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    summed = tl.zeros([PADDED_DIM], tl.float32)
    for split in range(NUM_SPLITS):
        start, end = keys_of_split(first_seen, context, split, NUM_SPLITS, MIN_SPLIT_KEYS)
        if start < end:
            slot_index = (row * HEADS + head) * NUM_SPLITS + split
            split_best = tl.load(highest + slot_index)
            new_best = tl.maximum(best, split_best)
            decay, share = tl.exp(best - new_best), tl.exp(split_best - new_best)
            values = tl.load(sums + slot_index * DIM + lanes, mask=lanes < DIM, other=0.0)
            summed = summed * decay + values * share
            total = total * decay + tl.load(totals + slot_index) * share
            best = new_best
    attended = (summed / total).to(output.dtype.element_ty)
    tl.store(output + (row * HEADS + head) * DIM + lanes, attended, mask=lanes < DIM)


@triton.jit
def keys_of_split(
    first_seen, context, split, NUM_SPLITS: tl.constexpr, MIN_SPLIT_KEYS: tl.constexpr
):  # fmt: skip
    """The key range of a split, from the row's own lengths alone; possibly empty."""
    length = tl.cdiv(tl.cdiv(context - first_seen, NUM_SPLITS), MIN_SPLIT_KEYS) * MIN_SPLIT_KEYS
    start = first_seen + split * length
    return start, tl.minimum(start + length, context)
