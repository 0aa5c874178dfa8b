"""Adapters of the common decoder, at the places of its fused linear layers. Knows no arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.model.adapters import Adapter, LowRank
from engine.model.decoder.decoder_config import DecoderConfig, NotCommon

#: The linear layers of a decoder layer, as `LayerWeights` names them.
PRODUCTS = ("qkv", "output", "gate_up", "down")


class Addition(NamedTuple):
    """What an adapter adds to the outputs of a product from `first` on."""

    first: int
    part: LowRank


#: By the name of the product; products that an adapter does not touch are absent.
LayerAdditions = Mapping[str, tuple[Addition, ...]]


@dataclass(frozen=True, slots=True)
class DecoderAdapter:
    """An adapter, layer by layer."""

    name: str
    layers: tuple[LayerAdditions, ...]


def place_adapter(config: DecoderConfig, adapter: Adapter) -> DecoderAdapter:
    """Find the fused product of each adapted linear layer, and where its outputs begin there.

    Raises:
        NotCommon: the adapter adds to a layer that is part of no product.
    """
    places = _places(config)
    layers: list[dict[str, tuple[Addition, ...]]] = [{} for _ in range(config.num_layers)]
    for name, part in adapter.layers.items():
        prefix, _, rest = name.removeprefix("model.layers.").partition(".")
        if rest not in places or not prefix.isdecimal() or int(prefix) >= config.num_layers:
            raise NotCommon(f"nothing is known to do with what the adapter adds to {name}")
        product, first = places[rest]
        layer = layers[int(prefix)]
        layer[product] = (*layer.get(product, ()), Addition(first, part))
    return DecoderAdapter(adapter.name, tuple(layers))


def _places(config: DecoderConfig) -> dict[str, tuple[str, int]]:
    """The product and the first output in it, by a linear layer's name in its decoder layer."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "self_attn.qkv_proj": ("qkv", 0),
        "self_attn.q_proj": ("qkv", 0),
        "self_attn.k_proj": ("qkv", queries),
        "self_attn.v_proj": ("qkv", queries + keys),
        "self_attn.o_proj": ("output", 0),
        "mlp.gate_up_proj": ("gate_up", 0),
        "mlp.gate_proj": ("gate_up", 0),
        "mlp.up_proj": ("gate_up", config.intermediate_size),
        "mlp.down_proj": ("down", 0),
    }
