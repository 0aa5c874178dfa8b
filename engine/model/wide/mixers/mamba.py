"""The selective state space of Mamba, in Mamba, Falcon Mamba, Jamba and Zamba.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, algorithm 2.
For each channel, with the state s [state_size], a step size d of the token and channel, and vectors
b and c of the token that all channels (in Zamba: those of a head) share:

    s = exp(d A) s + d x b        output = (s c + D x) silu(gate)
"""

from functools import partial
from typing import Any

import torch

from engine.model.device.state_pool import StateShapes
from engine.model.wide.mixers.constants import as_float, convolution_of, once
from engine.model.wide.mixers.functions import silu, softplus
from engine.model.wide.mixers.layer_state import LayerState


class Mamba:
    """State: the last inputs of the convolution, and a vector for each channel."""

    classes = frozenset({"MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer"})
    has_kernels = True

    def shapes(self, module: Any) -> StateShapes:
        history = (module.conv_kernel_size - 1, module.intermediate_size)
        return history, tuple(module.A_log.shape)

    def step(self, module: Any, hidden: torch.Tensor, state: LayerState) -> torch.Tensor:
        inputs, gate = _project(module, hidden)
        mixed = state.convolve(
            0, inputs, convolution_of(module.conv1d), activated_by=module.activation
        )
        sizes, into, out_of = _selected(module, mixed.to(hidden.dtype))
        values = mixed.view(sizes.shape)
        negative_rate, skip = once(module, _weights)
        outputs, new = state.rows.scan(
            partial(_update, negative_rate),
            state.read(1),
            values * sizes,
            sizes,
            into,
            out_of,
        )
        state.write(1, new)
        outputs = (outputs + values * skip).flatten(1) * silu(gate.float())
        mixed_again: torch.Tensor = module.out_proj(outputs.to(hidden.dtype))
        return mixed_again


def _project(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs of the convolution and the gate, [tokens, channels] each."""
    projected = module.in_proj(hidden)
    if hasattr(module, "n_mamba_heads"):
        inputs, gate = projected.view(len(hidden), -1, 2).unbind(dim=-1)
    else:
        inputs, gate = projected.chunk(2, dim=-1)
    return inputs, gate


def _selected(module: Any, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What depends on the token: step sizes [tokens, channels], b and c [tokens, 1, state_size].

    In Zamba there is a dimension of heads before the last one of step sizes, b and c.
    """
    widths = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
    if hasattr(module, "n_mamba_heads"):
        # The weights of each head are its own: [heads, tokens, ...] from here to the end.
        heads = mixed.view(len(mixed), module.n_mamba_heads, -1).transpose(0, 1)
        projected = torch.matmul(heads, module.x_proj_weight.mT)
        sizes, into, out_of = torch.split(projected, widths, dim=-1)
        sizes = torch.matmul(sizes, module.dt_proj_weight.mT) + module.dt_proj_bias[:, None]
        sizes, into, out_of = (each.transpose(0, 1) for each in (sizes, into, out_of))
    else:
        sizes, into, out_of = torch.split(module.x_proj(mixed), widths, dim=-1)
        if hasattr(module, "dt_layernorm"):
            sizes, into = module.dt_layernorm(sizes), module.b_layernorm(into)
            out_of = module.c_layernorm(out_of)
        sizes = module.dt_proj(sizes)
    into, out_of = into.float().unsqueeze(-2), out_of.float().unsqueeze(-2)
    return softplus(sizes.float()), into, out_of


def _weights(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A [channels, state_size] and D [channels]; in Zamba with a dimension of heads before."""
    return -as_float(module.A_log).exp(), as_float(module.D)


def _update(
    decay: torch.Tensor,
    state: torch.Tensor,
    values: torch.Tensor,
    sizes: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: the new state [rows, channels, state_size], and [rows, channels]."""
    state = state * torch.exp(sizes[..., None] * decay) + values[..., None] * into
    return state, (state * out_of).sum(dim=-1)
