"""The state space of Mamba-2, in Bamba, Granite 4, Nemotron-H, Falcon-H1 and Zamba2.

Dao and Gu, "Transformers are SSMs", 2024, section 7. For each head, with the state S [head_dim,
state_size], a step size d of the token, and vectors b and c that the heads of a group share:

    S = exp(d A) S + (d x) b^T        output = S c + D x

transformers limits d from below and above in a prompt and not in a decode. Here the limits hold for
both: a token must not depend on whether it is computed again. They matter where a config has some
and a step size is outside.
"""

import math
from typing import Any, NamedTuple

import torch

from engine.model.device.state_pool import StateShapes
from engine.model.kernels.recurrent import Convolution, MatrixInputs
from engine.model.wide.mixers.constants import as_float, convolution_of, once
from engine.model.wide.mixers.functions import silu, softplus
from engine.model.wide.mixers.layer_state import LayerState


class StateSpace(NamedTuple):
    """The weights of a recurrence in float32.

    Args:
        convolution: of the values x, then b and c of each group.
        rate: A, negative, [heads].
        bias: of a step size before softplus, [heads].
        skip: D, [heads].
    """

    convolution: Convolution
    rate: torch.Tensor
    bias: torch.Tensor
    skip: torch.Tensor

    @classmethod
    def of(
        cls,
        convolution: Convolution,
        log_rate: torch.Tensor,
        bias: torch.Tensor,
        skip: torch.Tensor,
    ) -> "StateSpace":
        """From a module's `A_log`, `dt_bias` and `D` of any type."""
        return cls(convolution, -as_float(log_rate).exp(), as_float(bias), as_float(skip))


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
        outputs = scan(
            inputs,
            sizes,
            once(module, _state_space),
            state,
            num_groups=module.n_groups,
            state_size=module.ssm_state_size,
            activated_by=module.activation,
            limits=module.time_step_limit,
        )
        mixed_again: torch.Tensor = module.out_proj(_gated(module, outputs, gate).to(hidden.dtype))
        return mixed_again


def scan(
    inputs: torch.Tensor,
    sizes: torch.Tensor,
    weights: StateSpace,
    state: LayerState,
    *,
    num_groups: int,
    state_size: int,
    activated_by: str = "silu",
    limits: tuple[float, float] = (0.0, math.inf),
) -> torch.Tensor:
    """The outputs before their norm, [tokens, heads * head_dim], rounded as `inputs`.

    Args:
        inputs: of the convolution, [tokens, channels].
        sizes: of the steps, before their bias and softplus, [tokens, heads].
        weights: of the layer.
        state: of the layer.
        num_groups: the vectors b, and c, of a token.
        state_size: of a vector.
        activated_by: the name of the activation after the convolution.
        limits: of a step size, from below and above.
    """
    mixed = state.convolve(0, inputs, weights.convolution, activated_by=activated_by)
    num_heads, width = sizes.shape[1], num_groups * state_size
    values, into, out_of = torch.split(mixed, [mixed.shape[1] - 2 * width, width, width], dim=-1)
    groups = (len(mixed), num_groups, state_size)
    size = softplus((sizes + weights.bias.to(sizes.dtype)).float()).clamp(*limits)
    outputs = state.recur(
        1,
        MatrixInputs(
            out_of.view(groups),
            into.view(groups),
            values.view(len(mixed), num_heads, -1),
            torch.exp(size * weights.rate)[..., None],
            size,
            weights.skip,
        ),
    )
    return outputs.flatten(1).to(inputs.dtype)


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


def _state_space(module: Any) -> StateSpace:
    return StateSpace.of(convolution_of(module.conv1d), module.A_log, module.dt_bias, module.D)
