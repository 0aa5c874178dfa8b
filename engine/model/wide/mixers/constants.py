"""What a mixer derives from a module's weights, computed once: weights do not change after load."""

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from engine.model.kernels.recurrent import Convolution

Derived = TypeVar("Derived")

_derived: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def once(module: nn.Module, derive: Callable[[Any], Derived]) -> Derived:
    """What `derive` returns for a module, which must be the same function in every call."""
    if module not in _derived:
        _derived[module] = derive(module)
    found: Derived = _derived[module]
    return found


def convolution_of(module: nn.Conv1d) -> Convolution:
    """The weights of a convolution of each channel, in float32."""
    return once(module, _convolution)


def _convolution(module: nn.Conv1d) -> Convolution:
    return Convolution.of(module.weight.squeeze(1), module.bias)


def as_float(weight: torch.Tensor) -> torch.Tensor:
    """A weight in float32, whose numbers are adjacent."""
    return weight.detach().float().contiguous()
