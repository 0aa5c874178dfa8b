"""The linear layers before and after each kind of mixer. Knows no tensors."""

from collections.abc import Mapping
from typing import NamedTuple

from engine.model.decoder.decoder_config import DecoderConfig
from engine.model.decoder.families import Mixer


class Projections(NamedTuple):
    """The linear layers of a mixer.

    Args:
        module: the name of its module in a layer.
        inputs: the names of those before it, which become one, and how many outputs each has.
        output: the name of the one after it.
        output_size: the inputs of that.
    """

    module: str
    inputs: Mapping[str, int]
    output: str
    output_size: int


def projections_of(config: DecoderConfig, mixer: Mixer) -> Projections:
    """Those of all layers with this mixer."""
    if mixer == "convolution":
        size = config.hidden_size
        return Projections("conv", {"in_proj": 3 * size}, "out_proj", size)
    if mixer != "attention":
        sizes = config.recurrence
        assert sizes is not None, "a config with such layers has their sizes"
        if mixer == "state_space":
            whole = sizes.output_size + sizes.channels + sizes.num_heads
            return Projections("mamba", {"in_proj": whole}, "out_proj", sizes.output_size)
        inputs = {"in_proj_qkv": sizes.channels, "in_proj_z": sizes.output_size}
        inputs |= {"in_proj_b": sizes.num_heads, "in_proj_a": sizes.num_heads}
        return Projections("linear_attn", inputs, "out_proj", sizes.output_size)
    keys = config.num_kv_heads * config.head_dim
    widths, names = (config.query_size, keys, keys), config.family.qkv
    parts = zip(names, widths, strict=True) if len(names) > 1 else [(names[0], sum(widths))]
    queries = config.num_heads * config.head_dim
    return Projections("self_attn", dict(parts), config.family.output, queries)
