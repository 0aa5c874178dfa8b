"""Functions of a number whose bits do not depend on what else is in the tensor.

On a CPU, `sigmoid`, `silu`, `gelu` and `softplus` of torch compute the last numbers of a tensor by
other instructions than the rest, which round differently. So a token would depend on the number of
tokens in its step. `exp` and `log1p` do not do that, nor do sums and products.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from transformers.activations import ACT2FN, GELUTanh, SiLUActivation

#: Keeps the norm of a query or key away from zero, as in transformers and flash-linear-attention.
NORM_EPSILON = 1e-6
#: Above it, softplus(x) is x in float32; torch has the same threshold.
SOFTPLUS_THRESHOLD = 20.0


def sigmoid(numbers: torch.Tensor) -> torch.Tensor:
    """The logistic function."""
    return 1.0 / (1.0 + torch.exp(-numbers))


def silu(numbers: torch.Tensor) -> torch.Tensor:
    """Each number times its sigmoid."""
    return numbers / (1.0 + torch.exp(-numbers))


def gelu_tanh(numbers: torch.Tensor) -> torch.Tensor:
    """GELU in its approximation by tanh; (1 + tanh(x)) / 2 is the logistic function of 2 x."""
    inner = math.sqrt(2.0 / math.pi) * (numbers + 0.044715 * numbers * numbers * numbers)
    return numbers / (1.0 + torch.exp(-2.0 * inner))


def softplus(numbers: torch.Tensor) -> torch.Tensor:
    """The logarithm of 1 + exp(x)."""
    small = numbers.clamp(max=SOFTPLUS_THRESHOLD)
    return torch.where(numbers > SOFTPLUS_THRESHOLD, numbers, torch.log1p(torch.exp(small)))


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation that a config names."""
    return activation_of(ACT2FN[name])


def activation_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function of an activation that is a module."""
    if isinstance(module, nn.SiLU | SiLUActivation):
        return silu
    return gelu_tanh if isinstance(module, GELUTanh) else module
