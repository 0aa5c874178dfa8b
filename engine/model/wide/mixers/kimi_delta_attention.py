"""Kimi delta attention, of Kimi Linear and Ling 3: the delta rule with a decay for each channel.

Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025, section 3.
"""

from typing import Any

import torch

from engine.model.device.state_pool import StateShapes
from engine.model.kernels.recurrent import MatrixInputs
from engine.model.wide.mixers.constants import as_float, convolution_of, once
from engine.model.wide.mixers.functions import NORM_EPSILON, sigmoid, softplus
from engine.model.wide.mixers.layer_state import LayerState


class KimiDeltaAttention:
    """State: the last inputs of the convolution, and a matrix for each head."""

    classes = frozenset({"KimiLinearDeltaAttention", "BailingHybridDeltaAttention"})
    has_kernels = True

    def shapes(self, module: Any) -> StateShapes:
        history = (module.conv_kernel_size - 1, module.conv_dim)
        return history, (module.num_heads, module.head_dim, module.head_dim)

    def step(self, module: Any, hidden: torch.Tensor, state: LayerState) -> torch.Tensor:
        heads = (len(hidden), module.num_heads, module.head_dim)
        parts = module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)
        mixed = state.convolve(
            0,
            torch.cat(parts, dim=-1),
            convolution_of(module.conv1d),
            activated_by=module.activation,
        )
        query, key, value = (part.view(heads) for part in mixed.chunk(3, dim=-1))
        outputs = state.recur(
            1,
            MatrixInputs(
                query,
                key,
                value,
                torch.exp(_log_decay(module.forget_gate, hidden)),
                sigmoid(module.b_proj(hidden).float()).to(hidden.dtype).float(),
                corrects=True,
                query_factor=module.head_dim**-0.5,
                epsilon=NORM_EPSILON,
            ),
        )
        is_ling = hasattr(module, "g_proj")
        gate = module.g_proj(hidden) if is_ling else module.g_b_proj(module.g_a_proj(hidden))
        normed = module.o_norm(outputs.to(hidden.dtype), gate.view(heads))
        mixed_again: torch.Tensor = module.o_proj(normed.flatten(1))
        return mixed_again


def _log_decay(gate: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The logarithm of each channel's decay, [tokens, heads, head_dim].

    -exp(A) softplus(x), or for a gate with a lower bound, bound * sigmoid(exp(A) x).
    """
    is_ling = hasattr(gate, "f_proj")
    projected = gate.f_proj(hidden) if is_ling else gate.f_b_proj(gate.f_a_proj(hidden))
    rate, bias = once(gate, _decay_weights)
    inputs = (projected.float() + bias).view(-1, gate.num_heads, gate.head_dim)
    if not is_ling:
        return -rate * softplus(inputs)
    bounded: torch.Tensor = gate.lower_bound * sigmoid(rate * inputs)
    found = bounded if gate.safe_gate else -rate * softplus(inputs)
    return found.to(hidden.dtype).float()


def _decay_weights(gate: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The rate of a decay, [heads, 1], and the bias of its gate."""
    return as_float(gate.A_log).exp().view(-1, 1), as_float(gate.dt_bias)
