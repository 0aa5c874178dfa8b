"""The gated delta net of Qwen3-Next, Qwen3.5 and Olmo Hybrid.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024, equation 10: the delta rule with one
decay for each value head.
"""

from typing import Any, NamedTuple

import torch

from engine.model.device.state_pool import StateShapes
from engine.model.kernels.recurrent import Convolution, MatrixInputs
from engine.model.wide.mixers.constants import as_float, convolution_of, once
from engine.model.wide.mixers.functions import NORM_EPSILON, sigmoid, softplus
from engine.model.wide.mixers.layer_state import LayerState


class Projected(NamedTuple):
    """What a module projects of each token.

    Args:
        mixed: [tokens, 2 * keys + values], queries, keys and values before the convolution.
        gate: [tokens, value heads, value_dim], for the norm of the output.
        strength, decay: [tokens, value heads], before their functions.
    """

    mixed: torch.Tensor
    gate: torch.Tensor
    strength: torch.Tensor
    decay: torch.Tensor


class DeltaRule(NamedTuple):
    """The weights of a recurrence in float32.

    Args:
        convolution: of queries, keys and values.
        rate: of the logarithm of a decay, negative, [value heads].
        bias: of a decay before softplus, [value heads].
    """

    convolution: Convolution
    rate: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def of(
        cls, convolution: Convolution, log_rate: torch.Tensor, bias: torch.Tensor
    ) -> "DeltaRule":
        """From a module's `A_log` and `dt_bias` of any type."""
        return cls(convolution, -as_float(log_rate).exp(), as_float(bias))


class GatedDeltaNet:
    """State: the last inputs of the convolution, and a matrix for each value head."""

    classes = frozenset(
        {"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"}
        | {"OlmoHybridGatedDeltaNet"}
    )
    has_kernels = True

    def shapes(self, module: Any) -> StateShapes:
        history = (module.conv_kernel_size - 1, module.conv_dim)
        return history, (module.num_v_heads, module.head_k_dim, module.head_v_dim)

    def step(self, module: Any, hidden: torch.Tensor, state: LayerState) -> torch.Tensor:
        projected = _project(module, hidden)
        outputs = recurred(
            projected,
            once(module, _delta_rule),
            state,
            num_key_heads=module.num_k_heads,
            activated_by=module.activation,
            largest_strength=2.0 if getattr(module, "allow_neg_eigval", False) else 1.0,
        )
        is_olmo = hasattr(module, "o_norm")
        norm, out = (module.o_norm, module.o_proj) if is_olmo else (module.norm, module.out_proj)
        normed = norm(outputs.flatten(0, 1), projected.gate.flatten(0, 1))
        mixed_again: torch.Tensor = out(normed.view(len(hidden), -1))
        return mixed_again


def recurred(
    projected: Projected,
    weights: DeltaRule,
    state: LayerState,
    *,
    num_key_heads: int,
    activated_by: str = "silu",
    largest_strength: float = 1.0,
) -> torch.Tensor:
    """The outputs before their norm, [tokens, value heads, value_dim], rounded as `projected`.

    Args:
        projected: of all tokens of a step.
        weights: of the layer.
        state: of the layer.
        num_key_heads: the heads of queries and keys.
        activated_by: the name of the activation after the convolution.
        largest_strength: the factor of each strength.
    """
    mixed, gate, strength, decay = projected
    values, dtype = gate.shape[1] * gate.shape[2], mixed.dtype
    keys = (mixed.shape[1] - values) // 2
    convolved = state.convolve(0, mixed, weights.convolution, activated_by=activated_by)
    query, key, value = torch.split(convolved, [keys, keys, values], dim=-1)
    by_head = (len(mixed), num_key_heads, keys // num_key_heads)
    outputs = state.recur(
        1,
        MatrixInputs(
            query.view(by_head),
            key.view(by_head),
            value.view(gate.shape),
            torch.exp(weights.rate * softplus(decay.float() + weights.bias))[..., None],
            sigmoid(strength.float()).to(dtype).float() * largest_strength,
            corrects=True,
            query_factor=by_head[2] ** -0.5,
            epsilon=NORM_EPSILON,
        ),
    )
    return outputs.to(dtype)


def _project(module: Any, hidden: torch.Tensor) -> Projected:
    """The projections of a module, which differ from family to family."""
    if hasattr(module, "in_proj_qkvz"):
        both = module.in_proj_qkvz(hidden)[None], module.in_proj_ba(hidden)[None]
        query, key, value, gate, strength, decay = (
            each[0] for each in module.fix_query_key_value_ordering(*both)
        )
        mixed = torch.cat([each.flatten(1) for each in (query, key, value)], dim=-1)
        return Projected(mixed, gate, strength, decay)
    if hasattr(module, "in_proj_qkv"):
        mixed, gate = module.in_proj_qkv(hidden), module.in_proj_z(hidden)
        strength, decay = module.in_proj_b(hidden), module.in_proj_a(hidden)
    else:
        parts = module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)
        mixed, gate = torch.cat(parts, dim=-1), module.g_proj(hidden)
        strength, decay = module.b_proj(hidden), module.a_proj(hidden)
    return Projected(mixed, gate.view(len(hidden), module.num_v_heads, -1), strength, decay)


def _delta_rule(module: Any) -> DeltaRule:
    return DeltaRule.of(convolution_of(module.conv1d), module.A_log, module.dt_bias)
