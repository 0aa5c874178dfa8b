"""Dense attention, shared by backends that use torch operations. Knows no block tables."""

import torch
import torch.nn.functional as functional


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
) -> torch.Tensor:
    """Attention of [batch, heads, queries, dim] to [batch, kv_heads, keys, dim].

    `bias` is added to the scores. Without a bias the attention is causal, and queries and keys must
    belong to the same tokens.
    """
    if softcap is not None:
        return _attend_capped(query, key, value, bias=bias, scaling=scaling, softcap=softcap)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=bias,
        is_causal=bias is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """`attend` with capped scores, which torch's fused kernels lack; the softmax is in float32."""
    batch, heads, queries, _ = query.shape
    groups = heads // key.shape[1]
    if bias is None:
        positions = torch.arange(queries, device=query.device)
        bias = additive(visible(positions, positions, None), query.dtype)
    if groups > 1:
        # Fold the query heads of one key head into the query axis, so that no key is copied.
        query = query.reshape(batch, heads // groups, groups * queries, -1)
        bias = bias.expand(*bias.shape[:-2], queries, -1)
        bias = torch.cat([bias] * groups, dim=-2)
    scores = torch.matmul(query, key.transpose(-1, -2)) * scaling
    scores = torch.tanh(scores / softcap) * softcap + bias
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).reshape(batch, heads, queries, -1)
