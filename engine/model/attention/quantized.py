"""Paged attention over an 8-bit cache, by any backend. Knows no model and no kernel.

It dequantizes the blocks that a step reads, one layer at a time, and lets the backend attend to the
copy. That takes memory for the keys and values of one layer; the compiled decoder does without.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.model.attention.interface import AttentionBackend, AttentionMetadata, StepAttention
from engine.model.device.quantized_kv import QUANTIZED, dequantize


def over_cache(backend: AttentionBackend, cache_dtype: torch.dtype) -> AttentionBackend:
    """`backend` for a cache of this type."""
    return QuantizedAttention(backend) if cache_dtype == QUANTIZED else backend


class QuantizedAttention:
    """A backend over dequantized copies of the blocks."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.name = f"{backend.name}-int8"
        self.reads_unwritten_slots = backend.reads_unwritten_slots

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        return _QuantizedStep(self._backend, metadata)


@dataclass(slots=True)
class _QuantizedStep:
    """Planned by its first call: a compiled decoder makes none."""

    backend: AttentionBackend
    metadata: AttentionMetadata
    _blocks: torch.Tensor | None = None
    _planned: StepAttention | None = None

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
        if self._planned is None or self._blocks is None:
            self._blocks, self._planned = self._plan()
        size = self.metadata.block_size
        keys, values = (
            dequantize(cache.index_select(0, self._blocks), size, query.dtype)
            for cache in (key_cache, value_cache)
        )
        return self._planned(
            query,
            keys,
            values,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )

    def _plan(self) -> tuple[torch.Tensor, StepAttention]:
        """The blocks to copy, [blocks], and the attention over the copies."""
        tables = self.metadata.valid_tables
        blocks, places = np.unique(tables, return_inverse=True)
        copied = replace(self.metadata, block_tables=places.reshape(tables.shape).astype(np.int64))
        device = self.metadata.device
        return torch.from_numpy(blocks).to(device), self.backend.prepare(copied)
