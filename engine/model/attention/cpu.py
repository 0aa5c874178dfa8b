"""Paged attention from batched torch operations. Knows no model; made for a CPU, runs anywhere.

Rows of one token (decodes) are computed in groups of similar context length, longer rows (chunks of
a prompt) one by one. The blocks of a group are gathered and used while they are still in the
processor's cache. The grouping changes a row's result by rounding errors at most.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.model.attention.dense import additive, attend, visible
from engine.model.attention.interface import AttentionMetadata, IntArray, StepAttention

#: Most bytes of keys gathered for one group of decodes: more would be evicted from the processor's
#: cache before they are used.
MAX_GROUP_BYTES = 3 * 1024 * 1024
#: A row joins a group if it has at least this share of the longest row's blocks, ...
MIN_FILL_SHARE = 0.75
#: ... or at most this many blocks less: a torch call costs more than a few blocks of padding.
MAX_PADDING_BLOCKS = 4


class CpuAttention:
    """One dense attention for each group of decodes and for each chunk."""

    name = "cpu"
    #: True because whole blocks are gathered.
    reads_unwritten_slots = True

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        return _CpuStep(metadata)


@dataclass(frozen=True, slots=True)
class _Group:
    """The rows of one call: several decodes, or one chunk.

    Args:
        tokens: the tokens of the step: indices for decodes, a slice for a chunk.
        num_rows: number of rows of the group; 1 for a chunk.
        cache_rows: [num_rows * kv_heads * blocks], row indices of the cache viewed as [num_blocks *
            kv_heads, slots * dim].
        num_keys: number of gathered slots that are used, without the tail of a chunk's last block.
        bias: [num_rows, 1, queries, num_keys], or None if the attention is causal without window.
    """

    tokens: torch.Tensor | slice
    num_rows: int
    cache_rows: torch.Tensor
    num_keys: int
    bias: torch.Tensor | None

    @property
    def is_chunk(self) -> bool:
        return isinstance(self.tokens, slice)


class _CpuStep:
    """One step; groups are computed once for all layers with the same window and cache shape."""

    def __init__(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._layouts: dict[tuple[object, ...], list[_Group]] = {}

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
        kv_heads = key_cache.shape[1]
        output = query.new_empty(*query.shape[:2], value_cache.shape[-1])
        for group in self._groups(key_cache, sliding_window):
            attended = attend(
                _fold(query[group.tokens], group, kv_heads),
                _gather(key_cache, group),
                _gather(value_cache, group),
                bias=group.bias,
                scaling=scaling,
                softcap=softcap,
                sinks=None if sinks is None else _fold_sinks(sinks, group, kv_heads),
            )
            output[group.tokens] = _unfold(attended, group)
        return output

    def _groups(self, cache: torch.Tensor, sliding_window: int | None) -> list[_Group]:
        layout = (sliding_window, cache.shape[1:], cache.dtype)
        if layout not in self._layouts:
            self._layouts[layout] = list(
                _Layout(self._metadata, cache, sliding_window=sliding_window).groups()
            )
        return self._layouts[layout]


class _Layout:
    """Divides the rows of a step into groups, for one window size and one cache shape."""

    def __init__(
        self, metadata: AttentionMetadata, cache: torch.Tensor, *, sliding_window: int | None
    ) -> None:
        self._metadata = metadata
        self._window = sliding_window
        self._dtype = cache.dtype
        self._kv_heads = cache.shape[1]
        self._max_group_blocks = max(1, MAX_GROUP_BYTES // cache[0].nbytes)
        first_visible = np.zeros_like(metadata.starts)
        if sliding_window is not None:
            first_visible = np.maximum(0, metadata.starts - sliding_window + 1)
        self._first_blocks: IntArray = first_visible // metadata.block_size
        self._last_blocks: IntArray = (metadata.context_lens - 1) // metadata.block_size

    def groups(self) -> Iterator[_Group]:
        for row in np.flatnonzero(self._metadata.query_lens > 1):
            yield self._chunk(int(row))
        for rows in self._similar_decodes():
            yield self._decodes(rows)

    def _similar_decodes(self) -> Iterator[IntArray]:
        """Groups of decodes, longest first, within the limits of padding and gathered bytes."""
        num_blocks = self._last_blocks - self._first_blocks + 1
        decodes = np.flatnonzero(self._metadata.query_lens == 1)
        decodes = decodes[np.argsort(-num_blocks[decodes], kind="stable")]
        while len(decodes):
            longest = int(num_blocks[decodes[0]])
            fewest = min(longest * MIN_FILL_SHARE, longest - MAX_PADDING_BLOCKS)
            size = int(np.count_nonzero(num_blocks[decodes] >= fewest))
            size = max(1, min(size, self._max_group_blocks // longest))
            yield decodes[:size]
            decodes = decodes[size:]

    def _decodes(self, rows: IntArray) -> _Group:
        metadata = self._metadata
        blocks = self._block_indices(rows)
        key_positions = self._positions(blocks)
        query_positions = torch.from_numpy(metadata.starts[rows][:, None])
        mask = visible(query_positions, torch.from_numpy(key_positions), self._window)
        return _Group(
            tokens=torch.from_numpy(metadata.offsets[rows]).to(metadata.device),
            num_rows=len(rows),
            cache_rows=self._cache_rows(rows, blocks),
            num_keys=key_positions.shape[1],
            bias=additive(mask, self._dtype).unsqueeze(1).to(metadata.device),
        )

    def _chunk(self, row: int) -> _Group:
        metadata = self._metadata
        rows = np.array([row])
        blocks = self._block_indices(rows)
        start, end = int(metadata.starts[row]), int(metadata.context_lens[row])
        offset = int(metadata.offsets[row])
        key_positions = np.arange(int(blocks[0, 0]) * metadata.block_size, end)
        bias = None
        if start > 0 or (self._window is not None and self._window < end):
            mask = visible(torch.arange(start, end), torch.from_numpy(key_positions), self._window)
            bias = additive(mask, self._dtype)[None, None].to(metadata.device)
        return _Group(
            tokens=slice(offset, offset + end - start),
            num_rows=1,
            cache_rows=self._cache_rows(rows, blocks),
            num_keys=len(key_positions),
            bias=bias,
        )

    def _block_indices(self, rows: IntArray) -> IntArray:
        """[rows, blocks], the visible blocks as indices into the rows' block tables.

        A shorter row is padded with its own last index: its own blocks contain finite numbers, but
        another request's may not. The padding counts as positions after the row's context.
        """
        first, last = self._first_blocks[rows][:, None], self._last_blocks[rows][:, None]
        blocks: IntArray = np.minimum(first + np.arange(int((last - first).max()) + 1), last)
        return blocks

    def _positions(self, blocks: IntArray) -> IntArray:
        """[rows, slots], the position of every gathered slot; they continue after the context."""
        slots = np.arange(blocks.shape[1] * self._metadata.block_size)
        return blocks[:, :1] * self._metadata.block_size + slots

    def _cache_rows(self, rows: IntArray, blocks: IntArray) -> torch.Tensor:
        table = self._metadata.block_tables[rows[:, None], blocks]
        heads = np.arange(self._kv_heads)[None, :, None]
        cache_rows = table[:, None, :] * self._kv_heads + heads
        return torch.from_numpy(cache_rows.reshape(-1)).to(self._metadata.device)


def _gather(cache: torch.Tensor, group: _Group) -> torch.Tensor:
    """[rows, kv_heads, keys, dim], a copy of the group's blocks in the order of their positions."""
    kv_heads, _, dim = cache.shape[1:]
    gathered = cache.flatten(0, 1).flatten(1).index_select(0, group.cache_rows)
    return gathered.view(group.num_rows, kv_heads, -1, dim)[:, :, : group.num_keys]


def _fold(query: torch.Tensor, group: _Group, kv_heads: int) -> torch.Tensor:
    """Reshape a group's queries from [tokens, heads, dim] to [rows, heads, queries, dim].

    The query heads of a decode that share a key head become its queries, so that no key is copied.
    """
    if group.is_chunk:
        return query.transpose(0, 1).unsqueeze(0)
    return query.view(group.num_rows, kv_heads, -1, query.shape[-1])


def _fold_sinks(sinks: torch.Tensor, group: _Group, kv_heads: int) -> torch.Tensor:
    """Reshape [heads] to [heads, queries or 1, 1], as `_fold` does with the queries."""
    return sinks.view(kv_heads if not group.is_chunk else len(sinks), -1, 1)


def _unfold(attended: torch.Tensor, group: _Group) -> torch.Tensor:
    """The inverse of `_fold`: [tokens, heads, dim]."""
    return attended[0].transpose(0, 1) if group.is_chunk else attended.flatten(1, 2)
