"""The state space of Mamba-2, in Bamba, Granite 4, Nemotron-H, Falcon-H1 and Zamba2.

Dao and Gu, "Transformers are SSMs", 2024, section 7. For each head, with the state S [head_dim,
state_size], a step size d of the token, and vectors b and c that the heads of a group share:

    S = exp(d A) S + (d x) b^T        output = S c + D x

transformers limits d from below and above in a prompt and not in a decode. Here the limits hold for
both: a token must not depend on whether it is computed again. They matter where a config has some
and a step size is outside.
"""

from typing import Any

import torch

from engine.model.device.state_pool import StateShapes
from engine.model.kernels.recurrent import MatrixInputs
from engine.model.wide.mixers.constants import as_float, convolution_of, once
from engine.model.wide.mixers.functions import silu, softplus
from engine.model.wide.mixers.layer_state import LayerState


class Mamba2:
    """State: the last inputs of the convolution, and a matrix for each head."""

    classes = frozenset(
        {"Mamba2Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"}
        | {"FalconH1Mixer", "Zamba2MambaMixer"}
    )
    has_kernels = True

    def shapes(self, module: Any) -> StateShapes:
        history = (module.conv_kernel_size - 1, module.conv_dim)
        # A head's state is transposed, to the form of `matrix_state`.
        return history, (module.num_heads, module.ssm_state_size, module.head_dim)

    def step(self, module: Any, hidden: torch.Tensor, state: LayerState) -> torch.Tensor:
        gate, inputs, sizes = _project(module, hidden)
        mixed = state.convolve(
            0, inputs, convolution_of(module.conv1d), activated_by=module.activation
        )
        width = module.n_groups * module.ssm_state_size
        values, into, out_of = torch.split(mixed, [module.intermediate_size, width, width], dim=-1)
        negative_rate, skip = once(module, _weights)
        size = softplus((sizes + module.dt_bias.to(sizes.dtype)).float())
        size = size.clamp(*module.time_step_limit)
        groups = (len(hidden), module.n_groups, module.ssm_state_size)
        outputs = state.recur(
            1,
            MatrixInputs(
                out_of.view(groups),
                into.view(groups),
                values.view(len(hidden), module.num_heads, -1),
                torch.exp(size * negative_rate)[..., None],
                size,
                skip,
            ),
        )
        gated = _gated(module, outputs.flatten(1).to(hidden.dtype), gate)
        mixed_again: torch.Tensor = module.out_proj(gated.to(hidden.dtype))
        return mixed_again


def _project(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gate, the inputs of the convolution and the step sizes of each token, [tokens, ...]."""
    is_scaled = hasattr(module, "ssm_in_multiplier")
    projected = module.in_proj(hidden * module.ssm_in_multiplier if is_scaled else hidden)
    if is_scaled:
        projected = projected * module.mup_vector.view(-1)
    widths = (module.intermediate_size, module.conv_dim, module.num_heads)
    gate, inputs, sizes = projected.split(widths, dim=-1)
    return gate, inputs, sizes


def _gated(module: Any, outputs: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The outputs with their gate, through the module's norm if it has one."""
    if getattr(module, "mamba_rms_norm", True):
        normed: torch.Tensor = module.norm(outputs, gate)
        return normed
    return outputs * silu(gate.float())


def _weights(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A and D, [heads] each."""
    return -as_float(module.A_log).exp(), as_float(module.D)
