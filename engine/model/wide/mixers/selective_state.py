"""The selective state space of Mamba in torch.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, algorithm 2.
For each channel, with the state s [state_size], a step size d of the token and channel, and vectors
b and c of the token that all channels of a group share:

    s = exp(d A) s + d x b        output = s c + D x
"""

from functools import partial

import torch

from engine.model.kernels.recurrent import SelectionInputs
from engine.model.recurrence import RecurrentRows


def scan(
    rows: RecurrentRows, state: torch.Tensor, inputs: SelectionInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [tokens, channels], and the new state [rows, state_size, channels]."""
    value, size, into, out_of, rate, skip = inputs
    outputs, new = rows.scan(partial(_update, rate), state, value * size, size, into.mT, out_of.mT)
    return outputs + value * skip, new


def _update(
    rate: torch.Tensor,
    state: torch.Tensor,
    values: torch.Tensor,
    sizes: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: the new state [rows, state_size, channels], and [rows, channels].

    `into` and `out_of` are [rows, state_size, groups].
    """
    groups = (into.shape[2], -1)
    change = values.unflatten(-1, groups)[:, None] * into[..., None]  # type: ignore[no-untyped-call]
    state = state * torch.exp(sizes[:, None] * rate) + change.flatten(2)
    read = state.unflatten(-1, groups) * out_of[..., None]  # type: ignore[no-untyped-call]
    return state, read.sum(dim=1).flatten(1)
