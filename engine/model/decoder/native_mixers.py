"""Describes mixers with a recurrent state to the kernels. Knows no layer."""

from engine.model.decoder.decoder_config import DeltaNet
from engine.model.decoder.decoder_weights import DeltaNetWeights
from engine.model.decoder.native_weights import PackedWeights
from engine.model.kernels.library import RecurrentMixerStruct, TapsStruct
from engine.model.kernels.recurrent import Convolution
from engine.model.wide.mixers.functions import NORM_EPSILON


def taps_of(convolution: Convolution, packed: PackedWeights) -> TapsStruct:
    """The weights of a convolution, which live as long as `packed`."""
    return TapsStruct(
        taps=packed.floats(convolution.taps),
        bias=packed.floats(convolution.bias),
        num_taps=len(convolution.taps),
    )


def delta_net_of(
    net: DeltaNet, weights: DeltaNetWeights, packed: PackedWeights
) -> RecurrentMixerStruct:
    """A gated delta net, whose weights live as long as `packed`."""
    (convolution, rate, bias), norm = weights.rule, weights.norm
    keys, gates = net.num_key_heads * net.key_dim, net.channels
    strengths = gates + net.output_size
    return RecurrentMixerStruct(
        convolution=taps_of(convolution, packed),
        channels=net.channels,
        inputs=0,
        gates=gates,
        strengths=strengths,
        sizes=strengths + net.num_heads,
        queries=0,
        keys=keys,
        values=2 * keys,
        num_heads=net.num_heads,
        num_key_heads=net.num_key_heads,
        key_dim=net.key_dim,
        value_dim=net.value_dim,
        size_biases=packed.floats(bias),
        rates=packed.floats(rate),
        corrects=True,
        query_factor=net.key_dim**-0.5,
        epsilon=NORM_EPSILON,
        norm=packed.floats(norm.repeat(net.num_heads)),
        norm_size=net.value_dim,
        gates_after_norm=True,
    )
