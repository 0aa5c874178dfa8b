"""The gated short convolution of LFM2: the state is the last inputs of a convolution."""

from typing import Any

import torch

from engine.model.device.state_pool import StateShapes
from engine.model.recurrence import LayerState, RecurrentRows, gated_convolution


class ShortConvolution:
    """State: the last inputs of the convolution, [taps - 1, channels]."""

    classes = frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"})

    def shapes(self, module: Any) -> StateShapes:
        channels, _, taps = module.conv.weight.shape
        return ((taps - 1, channels),)

    def step(
        self, module: Any, hidden: torch.Tensor, state: LayerState, rows: RecurrentRows
    ) -> torch.Tensor:
        projected, taps = module.in_proj(hidden), module.conv.weight.squeeze(1)
        convolved = gated_convolution(projected, taps, module.conv.bias, state, rows)
        mixed: torch.Tensor = module.out_proj(convolved)
        return mixed
