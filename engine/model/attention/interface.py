"""The interface of paged attention backends. Knows no model and no request.

A backend is called once per step (`prepare`, which may plan from the lengths on the host), and then
once per layer with the tensors of that layer. Two steps never overlap on the device, so a backend
may keep scratch memory there.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which tokens of a step see which cache slots. Host arrays, the same for every layer.

    Row r owns `query_lens[r]` consecutive tokens of the flattened step, at positions
    `context_lens[r] - query_lens[r] .. context_lens[r] - 1`, and the token at position p attends to
    0..p.

    Args:
        block_size: slots per block.
        query_lens: [rows], each at least 1.
        context_lens: [rows], the number of keys, those of this step's tokens included.
        block_tables: [rows, most blocks of any row]; position p of row r is in block
            `block_tables[r, p // block_size]`. Entries after a row's context are undefined.
        device: the device of cache and queries.
    """

    block_size: int
    query_lens: IntArray
    context_lens: IntArray
    block_tables: IntArray
    device: torch.device

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def starts(self) -> IntArray:
        """[rows], the position of each row's first token."""
        return self.context_lens - self.query_lens

    @property
    def offsets(self) -> IntArray:
        """[rows], the index of each row's first token in the flattened step."""
        return np.cumsum(self.query_lens) - self.query_lens

    @property
    def valid_tables(self) -> NDArray[np.int32]:
        """`block_tables` with block 0 in the undefined entries, for kernels that need valid ids."""
        sizes = -(-self.context_lens // self.block_size)
        behind = np.arange(self.block_tables.shape[1]) >= sizes[:, None]
        return np.where(behind, 0, self.block_tables).astype(np.int32)


class StepAttention(Protocol):
    """The attention of one step. Call it once per layer, after writing its keys and values."""

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
        """Causal attention of every token of the step through the block tables.

        Slots after a row's context have no weight, but a backend may read them
        (`reads_unwritten_slots`): then the slots of the row's blocks must contain finite numbers,
        which `KVPool.clear` ensures. All other slots may contain anything.

        Args:
            query: [tokens, heads, key_dim], the rows concatenated.
            key_cache: [num_blocks, kv_heads, block_size, key_dim]; heads is a multiple of kv_heads.
            value_cache: [num_blocks, kv_heads, block_size, value_dim].
            scaling: factor of the scores before the softmax.
            sliding_window: a token sees itself and the `sliding_window - 1` tokens before it; None
                for all.
            softcap: scores become `softcap * tanh(score / softcap)` before masking.
            sinks: [heads], a score for each query head that takes part in the softmax but has no
                value, so that the weights of the keys sum to less than one.

        Returns:
            [tokens, heads, value_dim], contiguous.
        """
        ...


class AttentionUnavailable(Exception):
    """This attention does not work here, or not with these options; the message is one sentence."""


class AttentionBackend(Protocol):
    """One way to compute paged attention on one kind of device."""

    @property
    def name(self) -> str:
        """The name in the configuration; part of the engine's fingerprint."""
        ...

    @property
    def reads_unwritten_slots(self) -> bool:
        """Whether unwritten slots enter sums with weight 0, so that they must be finite."""
        ...

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        """Plan one step. The result is valid until the next call."""
        ...


class DecodeAttention(Protocol):
    """Attention of decodes, planned from device tensors whose values may change after planning.

    It uses no values on the host, so a step with it can be captured and replayed. It reads no
    unwritten slot.
    """

    @property
    def name(self) -> str:
        """Part of the engine's fingerprint."""
        ...

    def plan_decodes(
        self, context_lens: torch.Tensor, block_tables: torch.Tensor, *, max_context: int
    ) -> StepAttention:
        """Plan for int32 tensors on the device, [rows] and [rows, blocks].

        Every entry of the tables must be a valid block id. `max_context` is the longest context
        that the tensors will contain while the plan is used.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeeds:
    """The features of a model's attention that a backend may not support.

    Args:
        heads: number of query heads. This and the other sizes are those of the layer with the
            largest queries.
        has_window, has_softcap, has_sinks: whether any layer has one.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    has_window: bool
    has_softcap: bool
    has_sinks: bool
