"""The recurrence of a matrix for each head in torch, which several mixers have.

With the state S [key_dim, value_dim], and of each token a decay a, which is one number or one for
each row of S, and a strength b:

    S = a S + k change^T        change = b (v - (a S)^T k), or b v
    output = S^T q + skip v

The former change is that of the delta rule: a state forgets, and corrects a value.
"""

from functools import partial

import torch

from engine.model.kernels.recurrent import MatrixInputs
from engine.model.recurrence import RecurrentRows


def scan(
    rows: RecurrentRows, state: torch.Tensor, inputs: MatrixInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [tokens, heads, value_dim], and the new state.

    `state` is [rows, heads, key_dim, value_dim].
    """
    value = inputs.value
    tokens_and_heads = value.shape[:2]
    strength = inputs.strength
    outputs, new = rows.scan(
        partial(_update, corrects=inputs.corrects),
        state,
        _of_heads(inputs.query, inputs) * inputs.query_factor,
        _of_heads(inputs.key, inputs),
        value,
        inputs.decay.expand(*tokens_and_heads, -1),
        value.new_ones(tokens_and_heads) if strength is None else strength,
    )
    if inputs.skip is not None:
        outputs = outputs + value * inputs.skip[:, None]
    return outputs, new


def _of_heads(vectors: torch.Tensor, inputs: MatrixInputs) -> torch.Tensor:
    """[tokens, heads, key_dim] from [tokens, key heads, key_dim]."""
    if inputs.epsilon is not None:
        squares = (vectors * vectors).sum(dim=-1, keepdim=True)
        vectors = vectors * torch.rsqrt(squares + inputs.epsilon)
    return vectors.repeat_interleave(inputs.value.shape[1] // vectors.shape[1], dim=1)


def _update(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    *,
    corrects: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: the new state [rows, heads, key_dim, value_dim], and [rows, heads, value_dim].

    `decay` is [rows, heads, 1] or [rows, heads, key_dim], and `strength` [rows, heads].
    """
    state = state * decay[..., None]
    if corrects:
        value = value - (state * key[..., None]).sum(dim=-2)
    change = value * strength[..., None]
    state = state + key[..., None] * change[..., None, :]
    return state, (state * query[..., None]).sum(dim=-2)
