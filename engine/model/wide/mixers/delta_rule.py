"""The delta rule with a decay, which several mixers have: a state forgets, and corrects a value.

For each head, with the state S [key_dim, value_dim], a decay a of the token, which is one number or
one for each row of S, and a strength b of the token:

    S = a S + k (b (v - (a S)^T k))^T        output = S^T q
"""

import torch

#: Keeps the norm of a query or key away from zero, as in transformers and flash-linear-attention.
NORM_EPSILON = 1e-6


def normalized(vectors: torch.Tensor) -> torch.Tensor:
    """[..., dim], each vector with a norm of 1."""
    return vectors * torch.rsqrt((vectors * vectors).sum(dim=-1, keepdim=True) + NORM_EPSILON)


def update(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: the new state [rows, heads, key_dim, value_dim], and [rows, heads, value_dim].

    `decay` is [rows, heads, 1] or [rows, heads, key_dim], and `strength` [rows, heads].
    """
    state = state * decay[..., None]
    known = (state * key[..., None]).sum(dim=-2)
    change = (value - known) * strength[..., None]
    state = state + key[..., None] * change[..., None, :]
    return state, (state * query[..., None]).sum(dim=-2)
