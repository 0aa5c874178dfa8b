"""Decode attention over paged keys as two Triton kernels. Knows no step and no model.

A row's keys are divided into at most NUM_SPLITS splits, which are computed in parallel and merged
by a second kernel: so a few long requests keep a whole device busy. How a row is split depends only
on its own context, so its result does not depend on other rows.
"""

import triton
import triton.language as tl
from triton import TritonError

__all__ = ["TritonError", "attend_splits", "merge_splits"]


@triton.jit(do_not_specialize=["window", "table_stride"])
def attend_splits(
    query, key_cache, value_cache, context_lens, block_tables, sums, highest, totals,
    scaling, window, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr, MIN_SPLIT_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some splits of one row and key head: of each, unnormalised sums, largest score, total weight.

    One loop has the tiles of all of them: the next keys are on their way at the end of a split.
    Two stages of it have keys and values; a third one for tables would take too many registers.
    """
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_lens + row)
    first_seen = tl.maximum(0, context - window)
    length = keys_per_split(context - first_seen, NUM_SPLITS, MIN_SPLIT_KEYS)
    if split < tl.cdiv(context - first_seen, length):
        members, lanes = tl.arange(0, GROUP_ROWS), tl.arange(0, PADDED_DIM)
        valid = (members[:, None] < GROUP) & (lanes[None, :] < DIM)
        first_head = row * HEADS + kv_head * GROUP
        at = members[:, None] * DIM + lanes[None, :]
        queries = tl.load(query + first_head * DIM + at, mask=valid, other=0.0)
        best = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_ROWS], tl.float32)
        summed = tl.zeros([GROUP_ROWS, PADDED_DIM], tl.float32)
        position = first_seen + split * length
        tiles = num_tiles(context - first_seen, split, length, TILE)
        for _ in tl.range(tiles, num_stages=2):
            end = tl.minimum(first_seen + (split + 1) * length, context)
            positions = position + tl.arange(0, TILE)
            visible = positions < end
            table = block_tables + row * table_stride
            blocks = tl.load(table + positions // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
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
            is_last = position + TILE >= end
            if is_last:
                place, of_member = first_head * NUM_SPLITS + split, members * NUM_SPLITS
                at = of_member[:, None] * DIM + lanes[None, :]
                tl.store(sums + place * DIM + at, summed, mask=valid)
                tl.store(highest + place + of_member, new_best, mask=members < GROUP)
                tl.store(totals + place + of_member, total, mask=members < GROUP)
            # Outside of the branch, which waits for the sums: the next keys must not.
            split = tl.where(is_last, split + tl.num_programs(2), split)
            position = tl.where(is_last, first_seen + split * length, position + TILE)
            best = tl.where(is_last, float("-inf"), new_best)
            total = tl.where(is_last, 0.0, total)
            summed = tl.where(is_last, 0.0, summed)


@triton.jit(do_not_specialize=["window"])
def merge_splits(
    output, sums, highest, totals, context_lens, window,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr, MIN_SPLIT_KEYS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row and head; skip splits without keys, which were not written."""
    row, head = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_lens + row)
    seen = tl.minimum(context, window)
    num_splits = tl.cdiv(seen, keys_per_split(seen, NUM_SPLITS, MIN_SPLIT_KEYS))
    lanes = tl.arange(0, PADDED_DIM)
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    summed = tl.zeros([PADDED_DIM], tl.float32)
    # All loads come before all sums, so that the program waits for memory once.
    loaded = ()
    for split in tl.static_range(NUM_SPLITS):
        is_used = split < num_splits
        slot = (row * HEADS + head) * NUM_SPLITS + split
        split_best = tl.load(highest + slot, mask=is_used, other=float("-inf"))
        split_total = tl.load(totals + slot, mask=is_used, other=0.0)
        values = tl.load(sums + slot * DIM + lanes, mask=(lanes < DIM) & is_used, other=0.0)
        # Triton knows no starred expressions.
        loaded = loaded + ((split_best, split_total, values),)  # type: ignore[assignment] # noqa: RUF005
    for split in tl.static_range(NUM_SPLITS):
        split_best, split_total, values = loaded[split]
        new_best = tl.maximum(best, split_best)
        decay, share = tl.exp(best - new_best), tl.exp(split_best - new_best)
        summed = summed * decay + values * share
        total = total * decay + split_total * share
        best = new_best
    attended = (summed / total).to(output.dtype.element_ty)
    tl.store(output + (row * HEADS + head) * DIM + lanes, attended, mask=lanes < DIM)


@triton.jit
def num_tiles(seen, split, length, TILE: tl.constexpr):
    """The tiles of a program's splits from `split` on; all but a row's last have whole tiles."""
    step = tl.num_programs(2)
    before_last = (tl.cdiv(seen, length) - 1 - split) // step
    keys_of_last = seen - (split + before_last * step) * length
    return before_last * (length // TILE) + tl.cdiv(tl.minimum(length, keys_of_last), TILE)


@triton.jit
def keys_per_split(seen, NUM_SPLITS: tl.constexpr, MIN_SPLIT_KEYS: tl.constexpr):
    """How many keys each split has but the last, from the row's own length alone."""
    return tl.cdiv(tl.cdiv(seen, NUM_SPLITS), MIN_SPLIT_KEYS) * MIN_SPLIT_KEYS
