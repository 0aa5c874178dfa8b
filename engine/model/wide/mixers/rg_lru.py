"""The real-gated linear recurrent unit (RG-LRU) of RecurrentGemma.

De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention", 2024, section 2.4. For
each channel, with the state s, and of the token the input x, a gate i of the input and a gate r:

    a = exp(-8 r softplus(p))        s = a s + sqrt(1 - a^2) i x        output = s

The first token has s = i x.
"""

from typing import Any

import torch

from engine.model.device.state_pool import StateShapes
from engine.model.wide.mixers.constants import convolution_of
from engine.model.wide.mixers.functions import activation_of, sigmoid, softplus
from engine.model.wide.mixers.layer_state import LayerState

#: The factor of the gate of the recurrence; the paper's constant c.
GATE_FACTOR = -8.0


class GatedLinearRecurrentUnit:
    """State: the last inputs of the convolution, and a number for each channel."""

    classes = frozenset({"RecurrentGemmaRecurrentBlock"})
    has_kernels = True

    def shapes(self, module: Any) -> StateShapes:
        return (module.conv1d_width - 1, module.lru_width), (module.lru_width,)

    def step(
        self, module: Any, hidden: torch.Tensor, state: LayerState
    ) -> tuple[torch.Tensor, None]:
        gate = activation_of(module.act_fn)(module.linear_y(hidden).float()).to(hidden.dtype)
        convolved = state.convolve(0, module.linear_x(hidden), convolution_of(module.conv_1d))
        inputs = convolved.to(hidden.dtype)
        unit = module.rg_lru
        recurrent = _gate(unit, inputs, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
        log_decay = GATE_FACTOR * recurrent * softplus(unit.recurrent_param.float())
        scale = torch.sqrt(1 - torch.exp(2 * log_decay))
        scale = torch.where(state.rows.begins[:, None], torch.ones_like(scale), scale)
        gated = inputs.float() * _gate(unit, inputs, unit.input_gate_weight, unit.input_gate_bias)
        outputs, new = state.rows.scan(_update, state.read(1), gated * scale, torch.exp(log_decay))
        state.write(1, new)
        return module.linear_out(outputs.to(hidden.dtype) * gate), None


def _gate(
    unit: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """[tokens, channels] from a matrix for each head, weight [heads, width, width]."""
    heads = inputs.view(len(inputs), unit.num_attention_heads, -1).transpose(0, 1)
    projected = torch.baddbmm(bias[:, None, :], heads, weight)
    return sigmoid(projected.transpose(0, 1).flatten(1).float())


def _update(
    state: torch.Tensor, inputs: torch.Tensor, decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: the new state [rows, channels], which is the output."""
    state = state * decay + inputs
    return state, state
