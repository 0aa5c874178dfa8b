"""Dense attention, shared by backends that use torch operations. Knows no block tables."""

from collections.abc import Iterator

import torch
import torch.nn.functional as functional

#: The most scores that are in memory at once where torch's fused kernels cannot be used, unless one
#: query has more: a chunk of 256 tokens over a context of 100,000 would have gigabytes of them.
MAX_SCORES = 1 << 23


def visible(
    query_positions: torch.Tensor, key_positions: torch.Tensor, sliding_window: int | None
) -> torch.Tensor:
    """The mask [..., queries, keys]: a query sees its own and earlier keys inside the window.

    Args:
        query_positions: [..., queries].
        key_positions: [..., keys].
        sliding_window: the most keys a query sees, its own included; None for no limit.
    """
    queries, keys = query_positions.unsqueeze(-1), key_positions.unsqueeze(-2)
    mask = keys <= queries
    if sliding_window is not None:
        mask &= keys > queries - sliding_window
    return mask


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask as a bias to add to scores: 0 where it is true, minus infinity elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, float("-inf")
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of [batch, heads, queries, dim] to [batch, kv_heads, keys, dim].

    `bias` is added to the scores. Without a bias the attention is causal, and queries and keys must
    belong to the same tokens. `sinks` expand to [batch, heads, queries, 1]; they are scores without
    values (see `engine.model.attention.interface.StepAttention`).
    """
    if softcap is not None or sinks is not None:
        return _attend_unfused(
            query, key, value, bias=bias, scaling=scaling, softcap=softcap, sinks=sinks
        )
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=bias,
        is_causal=bias is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`attend` with capped scores or sinks, which torch's fused kernels lack."""
    batch, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    groups = heads // kv_heads
    if bias is None:
        positions = torch.arange(queries, device=query.device)
        bias = additive(visible(positions, positions, None), query.dtype)
    # Fold the query heads of one key head into the query axis, so that no key is copied.
    query = query.reshape(batch, kv_heads, groups * queries, -1)
    bias = torch.cat([bias.expand(*bias.shape[:-2], queries, keys)] * groups, dim=-2)
    if sinks is not None:
        sinks = sinks.expand(batch, heads, queries, 1).reshape(batch, kv_heads, -1, 1)
    attended = []
    for rows in _slices(groups * queries, max(1, MAX_SCORES // (batch * kv_heads * keys))):
        scores = torch.matmul(query[:, :, rows], key.transpose(-1, -2)) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = _softmax(
            scores + bias[..., rows, :], None if sinks is None else sinks[:, :, rows]
        )
        attended.append(torch.matmul(weights.to(query.dtype), value))
    return torch.cat(attended, dim=2).reshape(batch, heads, queries, -1)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The softmax over the keys, and over the sink [..., 1] if there is one, in float32."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    joined = torch.cat([scores.float(), sinks.float()], dim=-1)
    return torch.softmax(joined, dim=-1)[..., :-1]


def _slices(size: int, most: int) -> Iterator[slice]:
    return (slice(first, min(first + most, size)) for first in range(0, size, most))
