"""Decode attention over pages as two Triton kernels. Knows no step and no model.

A row's keys are cut into at most NUM_SPLITS runs that are attended side by side and folded in a
second kernel: a few long requests then keep a whole device busy. How a row is cut depends on its
own context alone, so its result does not depend on its neighbours.
"""

import triton
import triton.language as tl
from triton import TritonError

__all__ = ["TritonError", "attend_runs", "fold_runs"]


@triton.jit
def attend_runs(
    query, key_cache, value_cache, context_lens, block_tables, sums, highest, totals,
    scaling, window, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr, LEAST_RUN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One run of keys of one row and key head: unnormalised sums, the largest score, the total."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_lens + row)
    first_seen = tl.maximum(0, context - window)
    start, end = run_of(first_seen, context, split, NUM_SPLITS, LEAST_RUN)
    if start < end:
        members, lanes = tl.arange(0, GROUP_ROWS), tl.arange(0, PADDED_DIM)
        heads = kv_head * GROUP + members
        real = (members[:, None] < GROUP) & (lanes[None, :] < DIM)
        at = (row * HEADS + heads[:, None]) * DIM + lanes[None, :]
        queries = tl.load(query + at, mask=real, other=0.0)
        best = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_ROWS], tl.float32)
        summed = tl.zeros([GROUP_ROWS, PADDED_DIM], tl.float32)
        for tile in range(start, end, TILE):
            places = tile + tl.arange(0, TILE)
            seen = places < end
            blocks = tl.load(
                block_tables + row * table_stride + places // BLOCK_SIZE, mask=seen, other=0
            ).to(tl.int64)
            slots = (blocks * KV_HEADS + kv_head) * BLOCK_SIZE + places % BLOCK_SIZE
            there = slots[:, None] * DIM + lanes[None, :]
            # Slots that are not seen are not read either: they may hold anything.
            readable = seen[:, None] & (lanes[None, :] < DIM)
            keys = tl.load(key_cache + there, mask=readable, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scaling
            scores = tl.where(seen[None, :], scores, float("-inf"))
            better = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp(scores - better[:, None])
            fade = tl.exp(best - better)
            values = tl.load(value_cache + there, mask=readable, other=0.0)
            weighed = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
            summed = summed * fade[:, None] + weighed
            total = total * fade + tl.sum(weights, 1)
            best = better
        place = (row * HEADS + heads) * NUM_SPLITS + split
        tl.store(sums + place[:, None] * DIM + lanes[None, :], summed, mask=real)
        tl.store(highest + place, best, mask=members < GROUP)
        tl.store(totals + place, total, mask=members < GROUP)


@triton.jit
def fold_runs(
    output, sums, highest, totals, context_lens, window,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr, LEAST_RUN: tl.constexpr,
):  # fmt: skip
    """The runs of one row and head become its attention; runs without keys were never written."""
    row, head = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_lens + row)
    first_seen = tl.maximum(0, context - window)
    lanes = tl.arange(0, PADDED_DIM)
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    summed = tl.zeros([PADDED_DIM], tl.float32)
    for split in range(NUM_SPLITS):
        start, end = run_of(first_seen, context, split, NUM_SPLITS, LEAST_RUN)
        if start < end:
            place = (row * HEADS + head) * NUM_SPLITS + split
            run_best = tl.load(highest + place)
            better = tl.maximum(best, run_best)
            fade, share = tl.exp(best - better), tl.exp(run_best - better)
            values = tl.load(sums + place * DIM + lanes, mask=lanes < DIM, other=0.0)
            summed = summed * fade + values * share
            total = total * fade + tl.load(totals + place) * share
            best = better
    attended = (summed / total).to(output.dtype.element_ty)
    tl.store(output + (row * HEADS + head) * DIM + lanes, attended, mask=lanes < DIM)


@triton.jit
def run_of(
    first_seen, context, split, NUM_SPLITS: tl.constexpr, LEAST_RUN: tl.constexpr
):  # fmt: skip
    """The keys of run `split`, from the row's own lengths alone; possibly none."""
    length = tl.cdiv(tl.cdiv(context - first_seen, NUM_SPLITS), LEAST_RUN) * LEAST_RUN
    start = first_seen + split * length
    return start, tl.minimum(start + length, context)
