"""The weights of the common decoder, with fused linear layers. Knows no arithmetic.

The projections of queries, keys and values become one matrix, and so do gates and ups: this gives
fewer and larger products. Every tensor of the checkpoint must be used, and none may be missing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.model.decoder.decoder_config import DecoderConfig, NotSupported


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [outputs, inputs] and an optional bias [outputs], as in torch."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of one layer. A norm that the model does not have is None.

    Args:
        qkv: its outputs are all query heads, then all key heads, then all value heads.
        gate_up: its outputs are all gates, then all ups.
    """

    attention_norm: torch.Tensor | None
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    attention_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    gate_up: Linear
    down: Linear
    mlp_post_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights; `head` and `embedding` share memory if the model ties them."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear


def read_weights(config: DecoderConfig, state: Mapping[str, torch.Tensor]) -> DecoderWeights:
    """Read the weights from a transformers state dict.

    Raises:
        NotSupported: a tensor is missing, unknown, or has an unexpected shape.
    """
    source = _Source(state)
    layers = tuple(_layer(config, source, index) for index in range(config.num_layers))
    weights = DecoderWeights(
        embedding=source.take("model.embed_tokens.weight"),
        layers=layers,
        final_norm=source.take("model.norm.weight"),
        head=Linear(source.take("lm_head.weight")),
    )
    if source.left:
        raise NotSupported(f"its tensor {min(source.left)} is unknown")
    _check_shapes(config, weights)
    return weights


class _Source:
    """Tensors by name; `left` has the names of unused ones."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state
        self.left = set(state)

    def take(self, name: str) -> torch.Tensor:
        if name not in self._state:
            raise NotSupported(f"its tensor {name} is missing")
        self.left.discard(name)
        return self._state[name].detach()

    def take_any(self, name: str) -> torch.Tensor | None:
        return self.take(name) if name in self._state else None

    def linear(self, prefix: str, *names: str) -> Linear:
        """Fuse linear layers that have the same input."""
        weights = [self.take(f"{prefix}.{name}.weight") for name in names]
        biases = [self.take_any(f"{prefix}.{name}.bias") for name in names]
        given = [bias for bias in biases if bias is not None]
        if given and len(given) != len(names):
            raise NotSupported(f"only some of {', '.join(names)} have a bias")
        if len(names) == 1:
            return Linear(weights[0], biases[0])
        return Linear(torch.cat(weights), torch.cat(given) if given else None)


def _layer(config: DecoderConfig, source: _Source, index: int) -> LayerWeights:
    layer = f"model.layers.{index}"
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    fused = config.family == "phi3"
    # `post_attention_layernorm` is the norm before the MLP in most families, but the norm after the
    # attention in OLMo 2.
    post = config.family == "olmo2"
    before_mlp = None if post else source.take(f"{layer}.post_attention_layernorm.weight")
    after_attention = source.take(f"{layer}.post_attention_layernorm.weight") if post else None
    return LayerWeights(
        attention_norm=None if post else source.take(f"{layer}.input_layernorm.weight"),
        qkv=source.linear(attention, *(("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj"))),
        query_norm=source.take_any(f"{attention}.q_norm.weight"),
        key_norm=source.take_any(f"{attention}.k_norm.weight"),
        output=source.linear(attention, "o_proj"),
        attention_post_norm=after_attention,
        mlp_norm=before_mlp,
        gate_up=source.linear(mlp, *(("gate_up_proj",) if fused else ("gate_proj", "up_proj"))),
        down=source.linear(mlp, "down_proj"),
        mlp_post_norm=source.take(f"{layer}.post_feedforward_layernorm.weight") if post else None,
    )


def _check_shapes(config: DecoderConfig, weights: DecoderWeights) -> None:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norm_sizes = (queries, keys) if config.norms_whole_projections else (config.head_dim,) * 2
    for layer in weights.layers:
        found = {
            "qkv": (layer.qkv.weight, (queries + 2 * keys, hidden)),
            "output": (layer.output.weight, (hidden, queries)),
            "gate_up": (layer.gate_up.weight, (2 * inner, hidden)),
            "down": (layer.down.weight, (hidden, inner)),
            "query_norm": (layer.query_norm, norm_sizes[:1]),
            "key_norm": (layer.key_norm, norm_sizes[1:]),
        }
        for name, (tensor, shape) in found.items():
            if tensor is not None and tuple(tensor.shape) != shape:
                raise NotSupported(f"its {name} is {tuple(tensor.shape)} instead of {shape}")
        if (layer.query_norm is None) != (layer.key_norm is None):
            raise NotSupported("it norms only one of queries and keys")
        if layer.gate_up.bias is not None:
            raise NotSupported("its gates have a bias")
