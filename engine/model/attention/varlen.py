"""Torch's attention over packed rows, as the torch at hand has it. Knows no pages and no step.

Its options came one by one: 2.11 has a scale and a window, 2.13 reads pages as well, and releases
in between had other names for that. So it is asked what it takes, never which release it is.
"""

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch

from engine.model.attention.interface import AttentionUnavailable

Varlen = Callable[..., Any]


def find_varlen(options: Collection[str]) -> Varlen:
    """`torch.nn.attention.varlen.varlen_attn`, if it takes all of these.

    Raises:
        AttentionUnavailable: naming what is missing.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise AttentionUnavailable(f"torch has no variable-length attention: {error}") from error
    missing = set(options) - parameters_of(varlen_attn)
    if missing:
        raise AttentionUnavailable(
            f"torch's varlen_attn does not take {', '.join(sorted(missing))}"
        )
    found: Varlen = varlen_attn
    return found


def grouping(varlen: Varlen, query: torch.Tensor, kv_heads: int) -> dict[str, bool]:
    """Some releases want to be told that query heads share key heads; others have no such word."""
    grouped = query.shape[1] != kv_heads
    return {"enable_gqa": True} if grouped and "enable_gqa" in parameters_of(varlen) else {}


def window_of(sliding_window: int | None) -> tuple[int, int]:
    """Keys to the left of a query's own, without limit at -1, and none to its right."""
    return (-1 if sliding_window is None else sliding_window - 1, 0)


@functools.cache
def parameters_of(function: Varlen) -> frozenset[str]:
    """The names of what a function takes."""
    return frozenset(inspect.signature(function).parameters)
