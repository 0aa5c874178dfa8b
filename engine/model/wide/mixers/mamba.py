"""The selective state space of Mamba, in Mamba, Falcon Mamba, Jamba and Zamba."""

from typing import Any

import torch

from engine.model.device.state_pool import StateShapes
from engine.model.kernels.recurrent import SelectionInputs
from engine.model.wide.mixers.constants import as_float, convolution_of, once
from engine.model.wide.mixers.functions import silu, softplus
from engine.model.wide.mixers.layer_state import LayerState


class Mamba:
    """State: the last inputs of the convolution, and a vector for each channel."""

    classes = frozenset({"MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer"})
    has_kernels = True

    def shapes(self, module: Any) -> StateShapes:
        history = (module.conv_kernel_size - 1, module.intermediate_size)
        return history, (module.ssm_state_size, module.intermediate_size)

    def step(self, module: Any, hidden: torch.Tensor, state: LayerState) -> torch.Tensor:
        inputs, gate = _project(module, hidden)
        mixed = state.convolve(
            0, inputs, convolution_of(module.conv1d), activated_by=module.activation
        )
        sizes, into, out_of = _selected(module, mixed.to(hidden.dtype))
        rate, skip = once(module, _weights)
        outputs = state.select(1, SelectionInputs(mixed, sizes, into, out_of, rate, skip))
        outputs = outputs * silu(gate.float())
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
    """Step sizes [tokens, channels], and b and c [tokens, groups, state_size] of each token.

    In Zamba each head is a group.
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
        into, out_of = into.unsqueeze(1), out_of.unsqueeze(1)
    vectors = into.float().contiguous(), out_of.float().contiguous()
    return softplus(sizes.float()).reshape(len(mixed), -1), *vectors


def _weights(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A [state_size, channels] and D [channels]."""
    rate = -as_float(module.A_log).exp()
    return rate.view(-1, rate.shape[-1]).T.contiguous(), as_float(module.D).view(-1)
