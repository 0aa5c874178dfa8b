"""The weights of the common decoder, with fused linear layers. Knows no arithmetic.

The projections of queries, keys and values become one matrix, and so do gates and ups: this gives
fewer and larger products. Every tensor of the checkpoint must be used, and none may be missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from engine.model.decoder.decoder_config import DecoderConfig, NotSupported
from engine.model.decoder.families import Family, Mixer
from engine.model.decoder.projections import projections_of
from engine.model.kernels.quantized import StoredWeight
from engine.model.kernels.recurrent import Convolution
from engine.model.wide.mixers.gated_delta_net import DeltaRule
from engine.model.wide.mixers.mamba2 import StateSpace
from engine.model.wide.stored_layers import dequantized_in, stand_in


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [outputs, inputs] and an optional bias [outputs], as in torch.

    Args:
        stored: the quantized weights that have the rows of `weight`, if they have all of them. Then
            `weight` may be a stand-in.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    stored: tuple[StoredWeight, ...] = ()

    @property
    def values(self) -> torch.Tensor:
        """The weight, dequantized if it is stored."""
        if not self.stored:
            return self.weight
        return torch.cat([dequantized_in(part, self.weight.dtype) for part in self.stored])


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of a layer; the router has one output per expert.

    Args:
        gate_up: [experts, 2, size, hidden], gates and ups. A view of the checkpoint's tensor, which
            may have another order in memory; so may `down`.
        down: [experts, hidden, size].
        gate_up_bias: [experts, 2, size], or None.
        down_bias: [experts, hidden], or None.
    """

    router: Linear
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    def of(self, expert: int) -> tuple[Linear, Linear]:
        """The gates, then the ups, of one expert as one linear layer; and its `down`."""
        biases = self.gate_up_bias, self.down_bias
        gate_up, down = (None if bias is None else bias[expert].flatten() for bias in biases)
        return Linear(self.gate_up[expert].flatten(0, 1), gate_up), Linear(self.down[expert], down)


@dataclass(frozen=True, slots=True)
class RecurrenceWeights:
    """The weights of a gated delta net or a state space between its projections.

    Args:
        rule: those of its recurrence.
        norm: of its outputs, without an offset: [value_dim] for each head of a gated delta net,
            [output_size] for a state space.
    """

    rule: DeltaRule | StateSpace
    norm: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of one layer. A norm that the model does not have is None.

    The weights of norms include the family's offset. They are float32 if the family's norms
    multiply in float32.

    Args:
        projection: its outputs are all query heads, each with a gate after it if the family has
            them, then all key heads, then all value heads. Those of a convolution: its gates, the
            gates of its outputs, and its values. Those of a delta net: what its convolution has,
            the gates of its outputs, and the strengths and decays of its heads. Those of a state
            space: the gates of its outputs, what its convolution has, and the step sizes of its
            heads.
        convolution, recurrence: instead of attention, or None.
        sinks: [heads], scores without a value.
        gate_up: its outputs are all gates, then all ups. None, like `down`, in a layer with
            experts instead.
    """

    attention_norm: torch.Tensor | None
    projection: Linear
    convolution: Convolution | None
    recurrence: RecurrenceWeights | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    output: Linear
    attention_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    gate_up: Linear | None
    down: Linear | None
    experts: ExpertWeights | None
    mlp_post_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights; `head` and `embedding` share memory if the model ties them.

    Args:
        stored_embedding: as in `Linear`.
    """

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear
    stored_embedding: tuple[StoredWeight, ...] = ()


def read_weights(
    config: DecoderConfig,
    state: Mapping[str, torch.Tensor],
    stored: Mapping[str, StoredWeight] = MappingProxyType({}),
) -> DecoderWeights:
    """Read the weights from a transformers state dict; each is stored once.

    The tensors of fused layers become views of the fused one, and their own memory is free again
    before the next layer is read. The parameters of a model must come as they are, with
    `keep_vars`: then the model computes with the same memory. `stored` has the quantized weights of
    some of them, by the same names; their tensors may be stand-ins.

    Raises:
        NotSupported: a tensor is missing, unknown, or has an unexpected shape.
    """
    source = _Source(state, stored, config.family)
    layers = tuple(_layer(config, source, index) for index in range(config.num_layers))
    embedding, head = f"{config.name}.embed_tokens.weight", "lm_head.weight"
    weights = DecoderWeights(
        embedding=source.take(embedding),
        layers=layers,
        final_norm=source.norm(f"{config.name}.{config.family.final_norm}"),
        head=Linear(source.take(head), stored=source.blocks(head)),
        stored_embedding=source.blocks(embedding),
    )
    if source.left:
        raise NotSupported(f"its tensor {min(source.left)} is unknown")
    _check_shapes(config, weights)
    return weights


class _Source:
    """Tensors by name; `left` has the names of unused ones."""

    def __init__(
        self,
        state: Mapping[str, torch.Tensor],
        stored: Mapping[str, StoredWeight],
        family: Family,
    ) -> None:
        self._state, self._stored = state, stored
        self._family = family
        self.left = set(state)

    def take(self, name: str) -> torch.Tensor:
        return self._given(name).detach()

    def _given(self, name: str) -> torch.Tensor:
        if name not in self._state:
            raise NotSupported(f"its tensor {name} is missing")
        self.left.discard(name)
        return self._state[name]

    def blocks(self, *names: str) -> tuple[StoredWeight, ...]:
        """What is stored of some weights; nothing if one of them is not stored."""
        found = [self._stored[name] for name in names if name in self._stored]
        return tuple(found) if len(found) == len(names) else ()

    def has(self, name: str) -> bool:
        return name in self._state

    def take_any(self, name: str) -> torch.Tensor | None:
        return self.take(name) if self.has(name) else None

    def norm(self, name: str) -> torch.Tensor:
        """The weight of a norm, with the family's offset; see `LayerWeights`."""
        weight = self.take(f"{name}.weight")
        if not self._family.norms_round_once:
            return weight
        return weight.float() + self._family.norm_offset

    def norm_of(self, prefix: str, name: str | None) -> torch.Tensor | None:
        """The weight of a norm that the family may not have."""
        return None if name is None else self.norm(f"{prefix}.{name}")

    def head_norm(self, name: str) -> torch.Tensor | None:
        """The weight of a norm that the model may not have."""
        return self.norm(name) if self.has(f"{name}.weight") else None

    def linear(self, prefix: str, *names: str) -> Linear:
        """Fuse linear layers that have the same input."""
        biases = [f"{prefix}.{name}.bias" for name in names]
        given = [self._given(name) for name in biases if self.has(name)]
        if given and len(given) != len(names):
            raise NotSupported(f"only some of {', '.join(names)} have a bias")
        weights = [f"{prefix}.{name}.weight" for name in names]
        parts, blocks = [self._given(name) for name in weights], self.blocks(*weights)
        if blocks:
            outputs = sum(len(part) for part in parts)
            fused = stand_in((outputs, *parts[0].shape[1:]), parts[0].dtype)
        else:
            fused = _fused([*map(self._dequantized, weights, parts)])
        return Linear(fused, _fused(given) if given else None, blocks)

    def _dequantized(self, name: str, given: torch.Tensor) -> torch.Tensor:
        stored = self._stored.get(name)
        return given if stored is None else dequantized_in(stored, given.dtype)


def _fused(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All rows of `parts` as one tensor, of which the parts become views."""
    if len(parts) == 1:
        return parts[0].detach()
    fused = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, torch.split(fused, [len(part) for part in parts]), strict=True):
        part.data = view
    return fused


def _layer(config: DecoderConfig, source: _Source, index: int) -> LayerWeights:
    layer = f"{config.name}.layers.{index}"
    family, mixer = config.family, config.mixers[index]
    attention, mlp = f"{layer}.self_attn", f"{layer}.{family.mlp}"
    names = projections_of(config, mixer)
    has_sinks = config.has_sinks and mixer == "attention"
    with_experts = f"{layer}.{family.experts or family.mlp}"
    has_experts = source.has(f"{with_experts}.{family.router}.weight")
    has_gates = family.experts is not None or not has_experts
    return LayerWeights(
        attention_norm=source.norm_of(layer, family.attention_norm),
        projection=source.linear(f"{layer}.{names.module}", *names.inputs),
        convolution=_convolution(source, f"{layer}.conv.conv") if mixer == "convolution" else None,
        recurrence=_recurrence(source, mixer, f"{layer}.{names.module}"),
        query_norm=source.head_norm(f"{attention}.{family.query_norm}"),
        key_norm=source.head_norm(f"{attention}.{family.key_norm}"),
        sinks=source.take(f"{attention}.sinks") if has_sinks else None,
        output=source.linear(f"{layer}.{names.module}", names.output),
        attention_post_norm=source.norm_of(layer, family.attention_post_norm),
        mlp_norm=source.norm_of(layer, family.mlp_norm),
        gate_up=source.linear(mlp, *family.gate_up) if has_gates else None,
        down=source.linear(mlp, family.down) if has_gates else None,
        experts=_experts(config, source, with_experts) if has_experts else None,
        mlp_post_norm=source.norm_of(layer, family.mlp_post_norm),
    )


def _convolution(source: _Source, name: str) -> Convolution:
    weight, bias = source.take(f"{name}.weight"), source.take_any(f"{name}.bias")
    return Convolution.of(weight.squeeze(1), bias)


def _recurrence(source: _Source, mixer: Mixer, name: str) -> RecurrenceWeights | None:
    if mixer in ("attention", "convolution"):
        return None
    convolution = _convolution(source, f"{name}.conv1d")
    rates = source.take(f"{name}.A_log"), source.take(f"{name}.dt_bias")
    rule: DeltaRule | StateSpace = DeltaRule.of(convolution, *rates)
    if mixer == "state_space":
        rule = StateSpace.of(convolution, *rates, source.take(f"{name}.D"))
    return RecurrenceWeights(rule, source.take(f"{name}.norm.weight"))


def _experts(config: DecoderConfig, source: _Source, mlp: str) -> ExpertWeights:
    if config.experts is None:
        raise NotSupported("it has experts that its config does not mention")
    count, size, hidden = config.experts.num_experts, config.experts.size, config.hidden_size
    gate_up = source.take(f"{mlp}.experts.gate_up_proj")
    down = source.take(f"{mlp}.experts.down_proj")
    gate_up_bias = source.take_any(f"{mlp}.experts.gate_up_proj_bias")
    shapes = [(count, 2 * size, hidden), (count, hidden, size)]
    if config.family.has_transposed_experts:
        shapes = [(count, hidden, 2 * size), (count, size, hidden)]
    if [tuple(gate_up.shape), tuple(down.shape)] != shapes:
        raise NotSupported(f"its experts are {tuple(gate_up.shape)} and {tuple(down.shape)}")
    if config.family.has_transposed_experts:
        gate_up = gate_up.view(count, hidden, size, 2).permute(0, 3, 2, 1)
        down = down.transpose(1, 2)
        if gate_up_bias is not None:
            gate_up_bias = gate_up_bias.view(count, size, 2).transpose(1, 2)
    elif gate_up_bias is not None:
        gate_up_bias = gate_up_bias.view(count, 2, size)
    return ExpertWeights(
        router=source.linear(mlp, config.family.router),
        gate_up=gate_up if gate_up.dim() == 4 else gate_up.view(count, 2, size, hidden),
        down=down,
        gate_up_bias=gate_up_bias,
        down_bias=source.take_any(f"{mlp}.experts.down_proj_bias"),
    )


#: What should have which shape, by its name in a message.
_Shapes = dict[str, tuple[torch.Tensor | None, tuple[int, ...]]]


def _recurrent_shapes(config: DecoderConfig, weights: RecurrenceWeights) -> _Shapes:
    sizes, rule = config.recurrence, weights.rule
    assert sizes is not None, "a config with such layers has their sizes"
    heads = (sizes.num_heads,)
    skips, normed = None, sizes.value_dim
    if isinstance(rule, StateSpace):
        skips, normed = rule.skip, sizes.output_size
    return {
        "taps": (rule.convolution.taps, (config.num_taps, sizes.channels)),
        "rates": (rule.rate, heads),
        "biases": (rule.bias, heads),
        "skips": (skips, heads),
        "norm": (weights.norm, (normed,)),
    }


def _check_shapes(config: DecoderConfig, weights: DecoderWeights) -> None:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    whole = config.family.norms_whole_projections
    norm_sizes = (queries, keys) if whole else (config.head_dim, config.head_dim)
    for mixer, layer in zip(config.mixers, weights.layers, strict=True):
        names = projections_of(config, mixer)
        found: _Shapes = {
            "projection": (layer.projection.weight, (sum(names.inputs.values()), hidden)),
            "output": (layer.output.weight, (hidden, names.output_size)),
            "query_norm": (layer.query_norm, norm_sizes[:1]),
            "key_norm": (layer.key_norm, norm_sizes[1:]),
            "sinks": (layer.sinks, (config.num_heads,)),
        }
        if layer.convolution is not None:
            found["taps"] = layer.convolution.taps, (config.num_taps, hidden)
        if layer.recurrence is not None:
            found |= _recurrent_shapes(config, layer.recurrence)
        if layer.gate_up is not None and layer.down is not None:
            found["gate_up"] = layer.gate_up.weight, (2 * inner, hidden)
            found["down"] = layer.down.weight, (hidden, inner)
            if layer.gate_up.bias is not None:
                raise NotSupported("its gates have a bias")
        if layer.experts is not None:
            found["router"] = layer.experts.router.weight, (len(layer.experts.down), hidden)
        _compare(found)
        if (layer.query_norm is None) != (layer.key_norm is None):
            raise NotSupported("it norms only one of queries and keys")


def _compare(found: _Shapes) -> None:
    for name, (tensor, shape) in found.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise NotSupported(f"its {name} is {tuple(tensor.shape)} instead of {shape}")
        if not tensor.numel():
            raise NotSupported(f"its {name} is empty")
