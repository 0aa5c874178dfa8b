"""The gated delta net of Qwen3-Next, Qwen3.5 and Olmo Hybrid.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024, equation 10: the delta rule with one
decay for each value head.
"""

from typing import Any, NamedTuple

import torch

from engine.model.device.state_pool import StateShapes
from engine.model.kernels.recurrent import MatrixInputs
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
        mixed = state.convolve(
            0, projected.mixed, convolution_of(module.conv1d), activated_by=module.activation
        )
        keys = (len(hidden), module.num_k_heads, module.head_k_dim)
        query, key, value = torch.split(
            mixed, [module.key_dim, module.key_dim, module.value_dim], dim=-1
        )
        strength = sigmoid(projected.strength.float()).to(hidden.dtype).float()
        if getattr(module, "allow_neg_eigval", False):
            strength = strength * 2.0
        negative_rate, bias = once(module, _decay_weights)
        decay = torch.exp(negative_rate * softplus(projected.decay.float() + bias))
        outputs = state.recur(
            1,
            MatrixInputs(
                query.view(keys),
                key.view(keys),
                value.view(len(hidden), module.num_v_heads, -1),
                decay[..., None],
                strength,
                corrects=True,
                query_factor=module.head_k_dim**-0.5,
                epsilon=NORM_EPSILON,
            ),
        )
        is_olmo = hasattr(module, "o_norm")
        norm, out = (module.o_norm, module.o_proj) if is_olmo else (module.norm, module.out_proj)
        normed = norm(outputs.to(hidden.dtype).flatten(0, 1), projected.gate.flatten(0, 1))
        mixed_again: torch.Tensor = out(normed.view(len(hidden), -1))
        return mixed_again


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


def _decay_weights(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor of softplus in the logarithm of a decay, and the bias inside, [value heads]."""
    return -as_float(module.A_log).exp(), as_float(module.dt_bias)
