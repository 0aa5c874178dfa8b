"""The gated short convolution of LFM2: the state is the last inputs of a convolution.

Liquid AI, "LFM2 Technical Report", 2025: out(C * conv(B * x)), with B, C and x from one product.
"""

from typing import Any

import torch

from engine.model.device.state_pool import StateShapes
from engine.model.recurrence import LayerState, RecurrentRows


class ShortConvolution:
    """State: the last inputs of the convolution, [taps - 1, channels]."""

    classes = frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"})

    def shapes(self, module: Any) -> StateShapes:
        channels, _, taps = module.conv.weight.shape
        return ((taps - 1, channels),)

    def step(
        self, module: Any, hidden: torch.Tensor, state: LayerState, rows: RecurrentRows
    ) -> torch.Tensor:
        before, after, values = module.in_proj(hidden).chunk(3, dim=-1)
        bias = module.conv.bias
        convolved, history = rows.convolve(
            (before * values).float(),
            state.read(0),
            module.conv.weight.squeeze(1).float(),
            None if bias is None else bias.float(),
        )
        state.write(0, history)
        mixed: torch.Tensor = module.out_proj(after * convolved.to(hidden.dtype))
        return mixed
