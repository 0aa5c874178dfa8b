"""Scales queries by their positions, for layers that would take the positions from the step.

Knows Llama 4 only: its layers without rotary positions scale their queries by the index of the
token in the forward pass, and ignore `position_ids`. In a step of several requests, that index is
not the position.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class PositionScale:
    """The factor of a query at position p: 1 + strength * log(1 + floor((p + 1) / interval)).

    Source: `Llama4TextAttention` of transformers, after "Scalable-Softmax Is Superior for
    Attention" (2025), https://arxiv.org/abs/2501.19399.
    """

    interval: int
    strength: float

    def apply(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Scale [tokens, heads, dim] by the positions, [tokens]; same type as `query`.

        The operations are those of transformers, in the same order, so that results are equal.
        """
        steps = torch.floor((positions.float() + 1.0) / self.interval)
        factors = torch.log1p(steps) * self.strength + 1.0
        return (query * factors[:, None, None]).to(query.dtype)


def position_scale_of(module: nn.Module) -> PositionScale | None:
    """The scale of an attention module; None if its queries have none."""
    layer: Any = module
    if not getattr(layer, "attn_temperature_tuning", False) or layer.use_rope:
        return None
    return PositionScale(int(layer.floor_scale), float(layer.attn_scale))


@contextmanager
def without_own_scale(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Keep modules that have a `PositionScale` from applying it themselves."""
    layers: Sequence[Any] = modules
    for layer in layers:
        layer.attn_temperature_tuning = False
    try:
        yield
    finally:
        for layer in layers:
            layer.attn_temperature_tuning = True
