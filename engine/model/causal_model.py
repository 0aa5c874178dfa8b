"""The one interface between the runner and a model, whichever path computes it.

Knows no request and no sampling: a flattened step goes in, logits come out, one row for each token
that is to be chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from engine.model.attention.interface import AttentionMetadata, StepAttention
from engine.model.device.kv_pool import KVPool, LayerShape, Slots

#: Stands for a token id where no logit is finite.
BROKEN = -2


class AdaptedTokens(NamedTuple):
    """Indices of the tokens of one adapter in a step, [count]."""

    adapter: str
    tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of one step, rows one after the other; [tokens] unless said otherwise.

    Args:
        token_ids: what is computed.
        positions: each token's place in its own request.
        slots: where its key and value go.
        logit_rows: [tokens to choose], indices of the tokens whose logits are wanted.
        metadata: which tokens see which slots.
        attention: the step's attention, planned once for all layers.
        adapted: the tokens that are computed with an adapter, one entry per adapter.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: Slots
    logit_rows: torch.Tensor
    metadata: AttentionMetadata
    attention: StepAttention
    adapted: Sequence[AdaptedTokens] = ()


class CausalModel(Protocol):
    """A decoder on a device."""

    @property
    def name(self) -> str:
        """Which path computes it; part of the engine's fingerprint."""
        ...

    @property
    def reads_unwritten_slots(self) -> bool:
        """Whether it reads slots without a token if the backend does: they must be finite."""
        ...

    @property
    def layer_shapes(self) -> Sequence[LayerShape]:
        """What each layer keeps of a token, in the order of the pool's layers."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of the logits; every token id below it may be fed and sampled."""
        ...

    def forward(self, inputs: StepInputs, kv_pool: KVPool) -> torch.Tensor:
        """Write the step's keys and values to `kv_pool`; return [tokens to choose, vocab_size]."""
        ...


@runtime_checkable
class Chooser(Protocol):
    """A decoder that can also find the likeliest tokens itself, without returning logits."""

    def choose(self, inputs: StepInputs, kv_pool: KVPool) -> torch.Tensor:
        """As `forward`, but returns [tokens to choose], the first token with the largest logit.

        `BROKEN` where that logit is not finite; a NaN counts as the largest.
        """
        ...
