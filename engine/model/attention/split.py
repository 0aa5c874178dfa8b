"""Paged attention in which rows of one token and longer rows use different kernels.

Knows no model. The backend for chunks may copy the keys of its rows, and most keys of a step belong
to decodes. The kernel for decodes reads them where they are.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.model.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    DecodeAttention,
    StepAttention,
)
from engine.model.device.transfer import to_device


class SplitAttention:
    """Rows of one token through `decode`, longer rows through `chunks`.

    The last token of a prompt may be computed by either, depending on its chunk. So this is not for
    `deterministic`.
    """

    def __init__(self, chunks: AttentionBackend, decode: DecodeAttention) -> None:
        self._chunks = chunks
        self._decode = decode
        self.name = f"{chunks.name}+{decode.name}"
        self.reads_unwritten_slots = chunks.reads_unwritten_slots

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        is_decode = metadata.query_lens == 1
        if not is_decode.any():
            return self._chunks.prepare(metadata)
        decodes = plan_rows(self._decode, _only(metadata, is_decode))
        if is_decode.all():
            return decodes
        # Of each token: whether it comes after the decodes' tokens. Decodes are usually first.
        behind = np.repeat(~is_decode, metadata.query_lens)
        in_order = (behind[:-1] <= behind[1:]).all()
        order = np.argsort(behind, kind="stable")
        return _SplitStep(
            decodes=decodes,
            chunks=self._chunks.prepare(_only(metadata, ~is_decode)),
            num_decodes=int(is_decode.sum()),
            order=None if in_order else to_device(order, metadata.device),
            back=None if in_order else to_device(np.argsort(order), metadata.device),
        )


def plan_rows(decode: DecodeAttention, metadata: AttentionMetadata) -> StepAttention:
    """Plan rows of one token each, from arrays on the host."""
    assert (metadata.query_lens == 1).all()
    return decode.plan_decodes(
        to_device(metadata.context_lens.astype(np.int32), metadata.device),
        to_device(metadata.valid_tables, metadata.device),
        max_context=int(metadata.context_lens.max()),
    )


@dataclass(frozen=True, slots=True)
class _SplitStep:
    """`order` and `back` are the permutations of the tokens; None if decodes come first."""

    decodes: StepAttention
    chunks: StepAttention
    num_decodes: int
    order: torch.Tensor | None
    back: torch.Tensor | None

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
        if self.order is not None:
            query = query[self.order]
        parts = (
            (self.decodes, query[: self.num_decodes]),
            (self.chunks, query[self.num_decodes :]),
        )
        attended = torch.cat(
            [
                attend(
                    queries,
                    key_cache,
                    value_cache,
                    scaling=scaling,
                    sliding_window=sliding_window,
                    softcap=softcap,
                    sinks=sinks,
                )
                for attend, queries in parts
            ]
        )
        return attended if self.back is None else attended[self.back]


def _only(metadata: AttentionMetadata, chosen: np.ndarray) -> AttentionMetadata:
    """The chosen rows, with no more columns of tables than they need."""
    context_lens = metadata.context_lens[chosen]
    width = -(-int(context_lens.max()) // metadata.block_size)
    return replace(
        metadata,
        query_lens=metadata.query_lens[chosen],
        context_lens=context_lens,
        block_tables=metadata.block_tables[chosen, :width],
    )
