"""The common decoder's sizes and options: all differences between its families.

Knows no config of transformers and no weights.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from engine.model.decoder.families import Family, Mixer
from engine.model.device.kv_pool import LayerShape
from engine.model.device.state_pool import StateShapes

Activation = Literal["silu", "gelu_tanh"]


class NotSupported(Exception):
    """The fast path cannot compute this model. The message is one sentence that says why."""


class Rotary(NamedTuple):
    """A rotary embedding: `inverse_frequencies` is [rotary_dim / 2], float32.

    Cosines and sines are multiplied by `scaling`.
    """

    inverse_frequencies: torch.Tensor
    scaling: float


class Experts(NamedTuple):
    """The mixture of experts of a layer.

    Args:
        num_experts: the number of experts of a layer.
        num_chosen: the number of experts that a token uses, those with the largest router outputs.
        size: the number of gates of one expert.
        normalizes: the weights of a token's experts, a softmax over all experts, are divided by
            their sum.
    """

    num_experts: int
    num_chosen: int
    size: int
    normalizes: bool


class Recurrence(NamedTuple):
    """The sizes of a gated delta net or a state space: each head has a state [key_dim, value_dim].

    Args:
        num_heads: those of values, gates and states.
        num_key_heads: those of queries and keys; each serves as many adjacent heads. They are the
            groups of a state space.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int

    @property
    def output_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of its convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.output_size


class ClampedSwiglu(NamedTuple):
    """The gates of GPT-OSS: gate * sigmoid(alpha * gate) * (up + 1), at most `limit`.

    Gates are limited from above, ups from both sides, before anything else.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The common decoder's sizes and options.

    Args:
        name: the name of the module with the layers.
        experts: the experts of the layers that have any; None if no layer has.
        activation: the activation of the gates.
        swiglu: what is computed instead of an activation; None for most families.
        scaling: factor of the attention scores.
        softcap: cap of the attention scores; None if they are not capped.
        has_sinks: whether each query head has a score without a value.
        rotaries: the different rotary embeddings of the layers. Each rotates as many leading
            dimensions of a head as the others, in pairs (i, i + rotary_dim / 2).
        mixers: the mixer of each layer.
        rotary_of: per layer, the index of its rotary embedding; None if it rotates nothing.
        windows: per layer, the number of keys a token sees, itself included; None for all.
        num_taps: the inputs of a convolution, if any, that one output depends on.
        recurrence: the sizes of the gated delta nets or state spaces; None if no layer has one.
        residual_multiplier: factor of each block's output before it is added to the residual
            stream.
        logits_divisor: the logits are divided by it.
        logits_softcap: cap of the logits; None if they are not capped.
    """

    family: Family
    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    epsilon: float
    experts: Experts | None
    activation: Activation
    swiglu: ClampedSwiglu | None
    scaling: float
    softcap: float | None
    has_sinks: bool
    rotaries: tuple[Rotary, ...]
    mixers: tuple[Mixer, ...]
    rotary_of: tuple[int | None, ...]
    windows: tuple[int | None, ...]
    num_taps: int
    recurrence: Recurrence | None
    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float
    logits_softcap: float | None

    @property
    def num_layers(self) -> int:
        return len(self.mixers)

    @property
    def places(self) -> Sequence[int]:
        """Per layer, its index among those with attention, or among those with a state."""
        seen: Counter[bool] = Counter()
        found = []
        for mixer in self.mixers:
            attends = mixer == "attention"
            found.append(seen[attends])
            seen[attends] += 1
        return found

    @property
    def layer_shapes(self) -> Sequence[LayerShape]:
        """As in `CausalModel`."""
        shape = LayerShape(self.num_kv_heads, self.head_dim, self.head_dim)
        return (shape,) * self.mixers.count("attention")

    @property
    def state_shapes(self) -> Sequence[StateShapes]:
        """As in `Recurrent`: the last inputs of a convolution, oldest first, then matrices."""
        sizes = self.recurrence
        parts: StateShapes = ((self.num_taps - 1, self.hidden_size),)
        if sizes is not None:
            matrices = (sizes.num_heads, sizes.key_dim, sizes.value_dim)
            parts = (self.num_taps - 1, sizes.channels), matrices
        return (parts,) * (self.num_layers - self.mixers.count("attention"))

    @property
    def query_size(self) -> int:
        """The outputs of the projection that are queries or their gates."""
        return self.num_heads * self.head_dim * (2 if self.family.gates_attention else 1)

    @property
    def rotary_dim(self) -> int:
        """The dimensions of a head that are rotated; 0 if no layer rotates any."""
        return 2 * len(self.rotaries[0].inverse_frequencies) if self.rotaries else 0
