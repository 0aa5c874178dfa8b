"""The projections of ZAYA's compressed convolutional attention, which look at earlier tokens.

Figliolia et al., "Compressed Convolutional Attention", 2025. Two causal convolutions mix queries
and keys, one within channels and one within heads; half of each value is that of the token before.
Attention itself is that of every model, with paged keys and values.
"""

from typing import Any

import torch

from engine.model.device.state_pool import StateShapes
from engine.model.wide.mixers.layer_state import LayerState


class CompressedConvolution:
    """State: the last queries and keys before the convolutions, and the delayed half of a value."""

    classes = frozenset({"ZayaCCAProjection"})
    has_kernels = False

    def shapes(self, module: Any) -> StateShapes:
        channels = module.conv_qk_depthwise.weight.shape[0]
        return (module.conv_kernel_size, channels), (1, module.v_proj_delayed.out_features)

    def step(
        self, module: Any, hidden: torch.Tensor, state: LayerState
    ) -> tuple[torch.Tensor, ...]:
        num_keys, shared = module.num_key_value_heads, module.num_key_value_groups
        queries = module.q_proj(hidden)
        keys = module.k_proj(hidden)
        convolved = _convolved(module, torch.cat((queries, keys), dim=-1), state)
        # Both keep half of what they were, and half of what they attend with.
        grouped = queries.view(len(hidden), num_keys, shared, -1)
        both = (grouped + keys.view(len(hidden), num_keys, 1, -1)) * 0.5
        query, key = torch.split(convolved, [num_keys * shared, num_keys], dim=1)
        halves = module.v_proj_current(hidden), _delayed(module, hidden, state)
        value = torch.cat(halves, dim=-1).view(key.shape)
        return query + both.flatten(1, 2), key + both.mean(dim=2), value


def _convolved(module: Any, inputs: torch.Tensor, state: LayerState) -> torch.Tensor:
    """Queries and keys after both convolutions, [tokens, heads, head_dim]."""
    window, history = state.rows.window(inputs.float(), state.read(0))
    state.write(0, history)
    tokens = list(window)
    first, second = module.conv_qk_depthwise, module.conv_qk_grouped
    num_heads = second.groups
    # [taps, heads, head_dim of the input, head_dim of the output]
    matrices = second.weight.unflatten(0, (num_heads, -1)).permute(3, 0, 2, 1)
    taps = first.weight.squeeze(1).float()
    mixed: torch.Tensor = second.bias.float().view(num_heads, 1, -1)
    for tap, matrix in enumerate(matrices):
        before = first.bias.float()
        for channel_tap in range(module.depthwise_kernel_size):
            before = before + tokens[tap + channel_tap] * taps[:, channel_tap]
        heads = before.to(inputs.dtype).unflatten(1, (num_heads, -1)).transpose(0, 1)
        mixed = mixed + torch.bmm(heads, matrix).float()
    return mixed.transpose(0, 1).to(inputs.dtype)


def _delayed(module: Any, hidden: torch.Tensor, state: LayerState) -> torch.Tensor:
    """[tokens, half of all values], projected of the token before; of zeros before the first."""
    projection = module.v_proj_delayed
    window, history = state.rows.window(projection(hidden).float(), state.read(1))
    state.write(1, history)
    before = next(window).to(hidden.dtype)
    if projection.bias is None:
        return before
    return torch.where(state.rows.begins[:, None], projection.bias, before)
