"""The gated delta net of Qwen3-Next, Qwen3.5 and Olmo Hybrid.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024, equation 10: the delta rule with one
decay for each value head.
"""

from typing import Any, NamedTuple

import torch

from engine.model.device.state_pool import StateShapes
from engine.model.recurrence import LayerState, RecurrentRows
from engine.model.wide.mixers import delta_rule
from engine.model.wide.mixers.functions import activation, sigmoid, softplus


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

    def shapes(self, module: Any) -> StateShapes:
        history = (module.conv_kernel_size - 1, module.conv_dim)
        return history, (module.num_v_heads, module.head_k_dim, module.head_v_dim)

    def step(
        self, module: Any, hidden: torch.Tensor, state: LayerState, rows: RecurrentRows
    ) -> torch.Tensor:
        projected = _project(module, hidden)
        bias = module.conv1d.bias
        convolved, history = rows.convolve(
            projected.mixed.float(),
            state.read(0),
            module.conv1d.weight.squeeze(1).float(),
            None if bias is None else bias.float(),
        )
        state.write(0, history)
        # Rounded as the module rounds the output of its convolution.
        mixed = activation(module.activation)(convolved).to(hidden.dtype).float()
        query, key, value = torch.split(
            mixed, [module.key_dim, module.key_dim, module.value_dim], dim=-1
        )
        strength = sigmoid(projected.strength.float()).to(hidden.dtype).float()
        if getattr(module, "allow_neg_eigval", False):
            strength = strength * 2.0
        bias_of_decay = projected.decay.float() + module.dt_bias.float()
        decay = torch.exp(-module.A_log.float().exp() * softplus(bias_of_decay))
        outputs, matrices = rows.scan(
            delta_rule.update,
            state.read(1),
            _normalized(module, query) / module.head_k_dim**0.5,
            _normalized(module, key),
            value.reshape(len(hidden), module.num_v_heads, -1),
            decay[..., None],
            strength,
        )
        state.write(1, matrices)
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


def _normalized(module: Any, vectors: torch.Tensor) -> torch.Tensor:
    """[tokens, value heads, key_dim] of norm 1; each key head serves several value heads."""
    heads = delta_rule.normalized(vectors.reshape(len(vectors), module.num_k_heads, -1))
    num_values: int = module.num_v_heads // module.num_k_heads
    return heads.repeat_interleave(num_values, dim=1)
