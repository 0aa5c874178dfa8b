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
from engine.model.recurrence import LayerState, RecurrentRows
from engine.model.wide.mixers.functions import activation, silu, softplus


class Mamba2:
    """State: the last inputs of the convolution, and a matrix for each head."""

    classes = frozenset(
        {"Mamba2Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"}
        | {"FalconH1Mixer", "Zamba2MambaMixer"}
    )

    def shapes(self, module: Any) -> StateShapes:
        history = (module.conv_kernel_size - 1, module.conv_dim)
        return history, (module.num_heads, module.head_dim, module.ssm_state_size)

    def step(
        self, module: Any, hidden: torch.Tensor, state: LayerState, rows: RecurrentRows
    ) -> torch.Tensor:
        gate, inputs, sizes = _project(module, hidden)
        bias = module.conv1d.bias
        convolved, history = rows.convolve(
            inputs.float(),
            state.read(0),
            module.conv1d.weight.squeeze(1).float(),
            None if bias is None else bias.float(),
        )
        state.write(0, history)
        # Rounded as the module rounds the output of its convolution.
        mixed = activation(module.activation)(convolved).to(hidden.dtype).float()
        width = module.n_groups * module.ssm_state_size
        values, into, out_of = torch.split(mixed, [module.intermediate_size, width, width], dim=-1)
        values = values.reshape(len(hidden), module.num_heads, -1)
        size = softplus((sizes + module.dt_bias.to(sizes.dtype)).float())
        size = size.clamp(*module.time_step_limit)
        outputs, matrices = rows.scan(
            _update,
            state.read(1),
            values * size[..., None],
            torch.exp(size * -torch.exp(module.A_log.float())),
            _of_heads(module, into),
            _of_heads(module, out_of),
        )
        state.write(1, matrices)
        outputs = outputs + values * module.D.float()[:, None]
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


def _of_heads(module: Any, vectors: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, state_size] from [tokens, groups * state_size]."""
    groups = vectors.reshape(len(vectors), module.n_groups, -1)
    num_heads: int = module.num_heads // module.n_groups
    return groups.repeat_interleave(num_heads, dim=1)


def _update(
    state: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: the new state [rows, heads, head_dim, state_size], and [rows, heads, head_dim]."""
    state = state * decay[..., None, None] + values[..., None] * into[..., None, :]
    return state, (state * out_of[..., None, :]).sum(dim=-1)
