"""The interface between the runner and a model, the same for every path.

Knows no request and no sampling: the input is a flattened step, the output has one row of logits
for each token to sample.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from engine.model.attention.interface import AttentionMetadata, StepAttention
from engine.model.device.kv_pool import KVPool, LayerShape, Slots
from engine.model.device.state_pool import StateShapes
from engine.model.recurrence import RecurrentRows
from engine.picture import Picture

#: Returned instead of a token id if the largest logit is not finite.
BROKEN = -2


class AdaptedTokens(NamedTuple):
    """The indices [count] of a step's tokens that use one adapter."""

    adapter: str
    tokens: torch.Tensor


class PicturedRow(NamedTuple):
    """The tokens of one row whose request has pictures.

    They are `first .. first + end - start - 1` of the step, and `start .. end - 1` of the request.
    """

    first: int
    start: int
    end: int
    pictures: Sequence[Picture]
    prompt_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of one step, its rows concatenated; shape [tokens] unless stated otherwise.

    Args:
        token_ids: the tokens to compute.
        positions: the index of each token in its own request.
        slots: the cache slots for each token's key and value.
        logit_rows: [logit rows], indices of the tokens whose logits are needed, in their order.
        metadata: which tokens see which slots.
        attention: the step's attention, planned once for all layers.
        adapted: the tokens with an adapter, one entry per adapter.
        pictured: the rows whose requests have pictures.
        recurrent: the rows, for a model with a recurrent state; None for others.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: Slots
    logit_rows: torch.Tensor
    metadata: AttentionMetadata
    attention: StepAttention
    adapted: Sequence[AdaptedTokens] = ()
    pictured: Sequence[PicturedRow] = ()
    recurrent: RecurrentRows | None = None


class CausalModel(Protocol):
    """A decoder on a device."""

    @property
    def name(self) -> str:
        """The path that computes it; part of the engine's fingerprint."""
        ...

    @property
    def reads_unwritten_slots(self) -> bool:
        """Whether it reads unwritten slots if the backend does, so that they must be finite."""
        ...

    @property
    def layer_shapes(self) -> Sequence[LayerShape]:
        """The shape of each layer's keys and values, in the order of the pool's layers."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of the logits; every token id below it may be an input and may be sampled."""
        ...

    def forward(self, inputs: StepInputs, kv_pool: KVPool) -> torch.Tensor:
        """Write the step's keys and values to `kv_pool`; return [logit rows, vocab_size]."""
        ...


@runtime_checkable
class Recurrent(Protocol):
    """A decoder that may have layers with a recurrent state, in the pool's `states`."""

    @property
    def state_shapes(self) -> Sequence[StateShapes]:
        """The shapes of each such layer's state; empty if there is none."""
        ...


def state_shapes_of(model: CausalModel) -> Sequence[StateShapes]:
    """The shapes of a model's recurrent states; empty if it has none."""
    return model.state_shapes if isinstance(model, Recurrent) else ()


class Chooser(ABC):
    """A decoder that can also compute the argmax of the logits, without returning the logits.

    Every step asks for it, and looking at a protocol takes as long as a layer of a small model.
    """

    @abstractmethod
    def choose(self, inputs: StepInputs, kv_pool: KVPool) -> torch.Tensor:
        """Like `forward`, but return the argmax of each row of logits, [logit rows].

        Of equal logits, the first wins. `BROKEN` if the largest logit is not finite; a NaN counts
        as the largest.
        """
