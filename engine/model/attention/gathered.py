"""Attention on CUDA for releases of torch that cannot read paged keys: gathers them first.

Knows no model. Compared with `cuda`, it writes and reads the keys of a step once more. The rows of
a step are processed in batches, so that not all long contexts are in memory twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.model.attention.interface import AttentionMetadata, StepAttention
from engine.model.attention.varlen import (
    Varlen,
    find_varlen,
    grouping,
    refuse_options,
    window_of,
)
from engine.model.device.transfer import to_device

#: Parameters that the function must have.
REQUIRED_OPTIONS = frozenset({"scale", "window_size"})
#: The most keys gathered at once, unless one row has more.
MAX_GATHERED_KEYS = 1 << 15


class GatheredAttention:
    """Rows of any length, in few calls.

    A row's keys are never split: torch splits them only when it reads pages or folds the queries of
    a key head, which it does not do with a causal window.

    Args:
        varlen: `torch.nn.attention.varlen.varlen_attn`, or a function with the same results.
        max_keys: the most keys gathered at once, unless one row has more.

    Raises:
        AttentionUnavailable: torch's function lacks a parameter.
    """

    name = "cuda-gathered"
    reads_unwritten_slots = False

    def __init__(self, varlen: Varlen | None = None, *, max_keys: int = MAX_GATHERED_KEYS) -> None:
        self._varlen = varlen or find_varlen(REQUIRED_OPTIONS)
        self._max_keys = max_keys

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        ranges = [
            _plan_range(metadata, first, end)
            for first, end in _row_ranges(metadata.context_lens, self._max_keys)
        ]
        return _GatheredStep(self._varlen, ranges)


@dataclass(frozen=True, slots=True)
class _RowRange:
    """Consecutive rows; cumulative lengths are int32 [rows + 1], `blocks` and `offsets` [keys]."""

    tokens: slice
    blocks: torch.Tensor
    offsets: torch.Tensor
    cumulative_queries: torch.Tensor
    cumulative_keys: torch.Tensor
    max_query: int
    max_context: int


@dataclass(frozen=True, slots=True)
class _GatheredStep:
    varlen: Varlen
    ranges: list[_RowRange]

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        refuse_options("cuda-gathered", softcap=softcap, sinks=sinks)
        attended = [
            self.varlen(
                query[one.tokens].contiguous(),
                # [keys, kv_heads, dim], in the order of rows and positions.
                key_cache[one.blocks, :, one.offsets],
                value_cache[one.blocks, :, one.offsets],
                one.cumulative_queries,
                one.cumulative_keys,
                one.max_query,
                one.max_context,
                scale=scaling,
                window_size=window_of(sliding_window),
                **grouping(self.varlen, query, key_cache.shape[1]),
            )
            for one in self.ranges
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended)


def _row_ranges(context_lens: np.ndarray, max_keys: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows with at most `max_keys` keys, or with one row."""
    first, keys = 0, 0
    for row, length in enumerate(context_lens.tolist()):
        if row > first and keys + length > max_keys:
            yield first, row
            first, keys = row, 0
        keys += length
    yield first, len(context_lens)


def _plan_range(metadata: AttentionMetadata, first: int, end: int) -> _RowRange:
    """Plan a range of rows. Slots are computed on the device; the host would need milliseconds."""
    query_lens, context_lens = metadata.query_lens[first:end], metadata.context_lens[first:end]
    cumulative = np.zeros((2, end - first + 1), dtype=np.int32)
    np.cumsum(query_lens, out=cumulative[0, 1:])
    np.cumsum(context_lens, out=cumulative[1, 1:])
    start, device, num_keys = int(metadata.offsets[first]), metadata.device, int(cumulative[1, -1])
    tables, lengths, ends = (
        to_device(array, device)
        for array in (metadata.block_tables[first:end], context_lens, cumulative[1])
    )
    # With `output_size`, torch does not wait for the device to compute the size.
    row_of_key = torch.repeat_interleave(lengths, output_size=num_keys)
    positions = torch.arange(num_keys, device=device) - ends[row_of_key]
    return _RowRange(
        tokens=slice(start, start + int(cumulative[0, -1])),
        blocks=tables[row_of_key, positions // metadata.block_size],
        offsets=positions % metadata.block_size,
        cumulative_queries=to_device(cumulative[0], device),
        cumulative_keys=ends,
        max_query=int(query_lens.max()),
        max_context=int(context_lens.max()),
    )
