"""Paged attention on CUDA: torch's flash attention over packed rows. Knows no model.

One call computes any mix of chunks and decodes. A row's keys are never split (`num_splits=1`), for
two reasons: with splits, the paged kernel of torch is silently wrong for every row after the first
(pytorch issue 194167); and without splits, the order of a row's sums does not depend on the batch.
"""

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
REQUIRED_OPTIONS = frozenset({"scale", "window_size", "seqused_k", "block_table", "num_splits"})


class CudaAttention:
    """Rows of any length in one call.

    Args:
        varlen: `torch.nn.attention.varlen.varlen_attn`, or a function with the same results.

    Raises:
        AttentionUnavailable: torch's function lacks a parameter.
    """

    name = "cuda"
    reads_unwritten_slots = False

    def __init__(self, varlen: Varlen | None = None) -> None:
        self._varlen = varlen or find_varlen(REQUIRED_OPTIONS)

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        rows = metadata.num_rows
        cumulative = np.zeros((2, rows + 1), dtype=np.int32)
        np.cumsum(metadata.query_lens, out=cumulative[0, 1:])
        np.cumsum(metadata.context_lens, out=cumulative[1, 1:])
        device = metadata.device
        return _VarlenStep(
            self._varlen,
            cumulative_queries=to_device(cumulative[0], device),
            cumulative_keys=to_device(cumulative[1], device),
            context_lens=to_device(metadata.context_lens.astype(np.int32), device),
            block_tables=to_device(metadata.valid_tables, device),
            max_query=int(metadata.query_lens.max()),
            max_context=int(metadata.context_lens.max()),
        )

    def plan_decodes(
        self, context_lens: torch.Tensor, block_tables: torch.Tensor, *, max_context: int
    ) -> StepAttention:
        rows = len(context_lens)
        cumulative = torch.arange(rows + 1, dtype=torch.int32, device=context_lens.device)
        keys = torch.zeros_like(cumulative)
        keys[1:] = context_lens.cumsum(0)
        return _VarlenStep(
            self._varlen,
            cumulative_queries=cumulative,
            cumulative_keys=keys,
            context_lens=context_lens,
            block_tables=block_tables,
            max_query=1,
            max_context=max_context,
        )


@dataclass(frozen=True, slots=True)
class _VarlenStep:
    """The arguments of the function: int32 tensors on the device."""

    varlen: Varlen
    cumulative_queries: torch.Tensor
    cumulative_keys: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    max_query: int
    max_context: int

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
        refuse_options("cuda", softcap=softcap, sinks=sinks)
        # The function's pages are [slots, kv_heads, dim]; only the last dimension must be
        # contiguous.
        attended: torch.Tensor = self.varlen(
            query.contiguous(),
            key_cache.transpose(1, 2),
            value_cache.transpose(1, 2),
            self.cumulative_queries,
            self.cumulative_keys,
            self.max_query,
            self.max_context,
            scale=scaling,
            window_size=window_of(sliding_window),
            seqused_k=self.context_lens,
            block_table=self.block_tables,
            num_splits=1,
            **grouping(self.varlen, query, key_cache.shape[1]),
        )
        return attended
