"""Describes mixers with a recurrent state to the kernels. Knows no layer."""

from typing import Any

import torch

from engine.model.decoder.decoder_config import Recurrence
from engine.model.decoder.decoder_weights import RecurrenceWeights
from engine.model.decoder.native_weights import PackedWeights
from engine.model.kernels.library import RecurrentMixerStruct, TapsStruct
from engine.model.kernels.recurrent import Convolution
from engine.model.wide.mixers.functions import NORM_EPSILON
from engine.model.wide.mixers.mamba2 import StateSpace


def taps_of(convolution: Convolution, packed: PackedWeights) -> TapsStruct:
    """The weights of a convolution, which live as long as `packed`."""
    return TapsStruct(
        taps=packed.floats(convolution.taps),
        bias=packed.floats(convolution.bias),
        num_taps=len(convolution.taps),
    )


def recurrent_mixer(
    sizes: Recurrence, weights: RecurrenceWeights, packed: PackedWeights
) -> RecurrentMixerStruct:
    """A gated delta net or a state space, whose weights live as long as `packed`."""
    rule = weights.rule
    own = _state_space if isinstance(rule, StateSpace) else _delta_net
    return RecurrentMixerStruct(
        convolution=taps_of(rule.convolution, packed),
        channels=sizes.channels,
        num_heads=sizes.num_heads,
        num_key_heads=sizes.num_key_heads,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        size_biases=packed.floats(rule.bias),
        rates=packed.floats(rule.rate),
        skips=packed.floats(rule.skip) if isinstance(rule, StateSpace) else None,
        **own(sizes, weights.norm, packed),
    )


def _delta_net(sizes: Recurrence, norm: torch.Tensor, packed: PackedWeights) -> dict[str, Any]:
    """Projected are queries, keys and values, gates, strengths, step sizes."""
    keys, gates = sizes.num_key_heads * sizes.key_dim, sizes.channels
    strengths = gates + sizes.output_size
    return {
        "inputs": 0,
        "gates": gates,
        "strengths": strengths,
        "sizes": strengths + sizes.num_heads,
        "queries": 0,
        "keys": keys,
        "values": 2 * keys,
        "corrects": True,
        "query_factor": sizes.key_dim**-0.5,
        "epsilon": NORM_EPSILON,
        "norm": packed.floats(norm.repeat(sizes.num_heads)),
        "norm_size": sizes.value_dim,
        "gates_after_norm": True,
    }


def _state_space(sizes: Recurrence, norm: torch.Tensor, packed: PackedWeights) -> dict[str, Any]:
    """Projected are gates, then values, keys and queries, then step sizes."""
    values, keys = sizes.output_size, sizes.num_key_heads * sizes.key_dim
    return {
        "inputs": values,
        "gates": 0,
        "strengths": -1,
        "sizes": values + sizes.channels,
        "queries": values + keys,
        "keys": values,
        "values": 0,
        "corrects": False,
        "query_factor": 1.0,
        "epsilon": -1.0,
        "norm": packed.floats(norm),
        "norm_size": values // sizes.num_key_heads,
        "gates_after_norm": False,
    }
