"""Maps adapters to the fused linear layers of the common decoder. Knows no arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from engine.model.adapters import Adapter, LowRank
from engine.model.decoder.decoder_config import DecoderConfig, NotSupported
from engine.model.decoder.projections import projections_of

#: The linear layers of a decoder layer, as `LayerWeights` names them.
PRODUCTS = ("projection", "output", "gate_up", "down")


class Addition(NamedTuple):
    """An adapter's addition to a product: `part` is added to the outputs from index `first` on."""

    first: int
    part: LowRank


#: Additions by the name of the product. Products that an adapter does not change are absent.
LayerAdditions = Mapping[str, tuple[Addition, ...]]


@dataclass(frozen=True, slots=True)
class DecoderAdapter:
    """One adapter; `layers` has the additions of each decoder layer."""

    name: str
    layers: tuple[LayerAdditions, ...]


def map_adapter(config: DecoderConfig, adapter: Adapter) -> DecoderAdapter:
    """Find the fused product of each adapted linear layer, and its first output there.

    Raises:
        NotSupported: the adapter changes a layer that is part of no fused product.
    """
    outputs = _fused_outputs(config)
    layers: list[dict[str, tuple[Addition, ...]]] = [{} for _ in range(config.num_layers)]
    for name, part in adapter.layers.items():
        prefix, _, rest = name.removeprefix(f"{config.name}.layers.").partition(".")
        if rest not in outputs or not prefix.isdecimal() or int(prefix) >= config.num_layers:
            raise NotSupported(f"the fast path has no layer {name}, which the adapter changes")
        product, first = outputs[rest]
        layer = layers[int(prefix)]
        layer[product] = (*layer.get(product, ()), Addition(first, part))
    return DecoderAdapter(adapter.name, tuple(layers))


def _fused_outputs(config: DecoderConfig) -> dict[str, tuple[str, int]]:
    """For each linear layer of a decoder layer: its fused product and its first output there."""
    family = config.family
    # Families with one fused layer have only the first of these outputs.
    gates = zip(family.gate_up, (0, config.intermediate_size), strict=False)
    found = {f"{family.mlp}.{name}": ("gate_up", first) for name, first in gates}
    found[f"{family.mlp}.{family.down}"] = ("down", 0)
    for mixer in {*config.mixers}:
        module, inputs, output, _ = projections_of(config, mixer)
        firsts = accumulate(inputs.values(), initial=0)
        found |= {
            f"{module}.{name}": ("projection", first)
            for name, first in zip(inputs, firsts, strict=False)
        }
        found[f"{module}.{output}"] = ("output", 0)
    return found
