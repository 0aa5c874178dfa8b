"""Paged attention one token at a time: tensor shapes depend only on the token's position.

Knows no model. It needs one call per token and layer, but rounding cannot depend on other tokens,
on chunks or on the batch. `deterministic` uses it where no faster backend is batch-invariant.
"""

from dataclasses import replace

import numpy as np

from engine.model.attention.interface import AttentionMetadata, StepAttention
from engine.model.attention.reference import ReferenceAttention


class SingleTokenAttention:
    """The reference backend, with every token as a separate row."""

    name = "single-token"
    reads_unwritten_slots = False

    def __init__(self) -> None:
        self._reference = ReferenceAttention()

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        lengths = metadata.query_lens
        first = np.repeat(metadata.starts - metadata.offsets, lengths)
        return self._reference.prepare(
            replace(
                metadata,
                query_lens=np.ones_like(first),
                context_lens=np.arange(len(first)) + first + 1,
                block_tables=np.repeat(metadata.block_tables, lengths, axis=0),
            )
        )
