"""The gated short convolution of LFM2: the state is the last inputs of a convolution."""

from typing import Any

import torch

from engine.model.device.state_pool import StateShapes
from engine.model.kernels.recurrent import Convolution
from engine.model.wide.mixers.constants import convolution_of
from engine.model.wide.mixers.layer_state import LayerState


class ShortConvolution:
    """State: the last inputs of the convolution, [taps - 1, channels]."""

    classes = frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"})
    has_kernels = True

    def shapes(self, module: Any) -> StateShapes:
        channels, _, taps = module.conv.weight.shape
        return ((taps - 1, channels),)

    def step(self, module: Any, hidden: torch.Tensor, state: LayerState) -> torch.Tensor:
        convolved = gated_convolution(module.in_proj(hidden), convolution_of(module.conv), state)
        mixed: torch.Tensor = module.out_proj(convolved)
        return mixed


def gated_convolution(
    projected: torch.Tensor, convolution: Convolution, state: LayerState
) -> torch.Tensor:
    """C * conv(B * x), [tokens, channels], of which `projected` has B, C and x beside each other.

    Liquid AI, "LFM2 Technical Report", 2025. The only part of `state` is that of
    `LayerState.convolve`. Products are rounded to the type of `projected`.
    """
    before, after, values = projected.chunk(3, dim=-1)
    return after * state.convolve(0, before * values, convolution).to(projected.dtype)
