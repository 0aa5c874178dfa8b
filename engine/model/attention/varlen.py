"""Finds torch's variable-length attention and its options in the installed torch.

Its options were added one by one: 2.11 has a scale and a window, 2.13 can also read pages, and
releases between them used other names. So the signature is inspected, not torch's version.
"""

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch

from engine.model.attention.interface import AttentionUnavailable

Varlen = Callable[..., Any]


def find_varlen(options: Collection[str]) -> Varlen:
    """`torch.nn.attention.varlen.varlen_attn`, if it has all parameters in `options`.

    Raises:
        AttentionUnavailable: a parameter is missing; the message names it.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise AttentionUnavailable(f"torch has no variable-length attention: {error}") from error
    missing = set(options) - parameters_of(varlen_attn)
    if missing:
        raise AttentionUnavailable(
            f"torch's varlen_attn does not have {', '.join(sorted(missing))}"
        )
    found: Varlen = varlen_attn
    return found


def refuse_options(name: str, *, softcap: float | None, sinks: torch.Tensor | None) -> None:
    """Refuse the options of a layer that torch's function does not have.

    Raises:
        AttentionUnavailable: the message has the backend's `name` and the option.
    """
    for option, value in (("capped scores", softcap), ("sinks", sinks)):
        if value is not None:
            raise AttentionUnavailable(f"the attention backend {name!r} does not support {option}")


def grouping(varlen: Varlen, query: torch.Tensor, kv_heads: int) -> dict[str, bool]:
    """The option for grouped query heads, which only some releases have and need."""
    grouped = query.shape[1] != kv_heads
    return {"enable_gqa": True} if grouped and "enable_gqa" in parameters_of(varlen) else {}


def window_of(sliding_window: int | None) -> tuple[int, int]:
    """The keys a query sees before and after its own: -1 for no limit, and 0 after."""
    return (-1 if sliding_window is None else sliding_window - 1, 0)


@functools.cache
def parameters_of(function: Varlen) -> frozenset[str]:
    """The names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)
