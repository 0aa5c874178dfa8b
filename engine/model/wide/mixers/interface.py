"""What a kind of mixer offers: the classes it replaces, the shapes of its state, and its step."""

from collections.abc import Set
from typing import Any, Protocol

import torch

from engine.model.device.state_pool import StateShapes
from engine.model.wide.mixers.layer_state import LayerState

#: What a module returns: a tensor, or several things. Some return None for what was not asked for.
Mixed = torch.Tensor | tuple[torch.Tensor | None, ...]


class Mixer(Protocol):
    """One kind of recurrence, for modules of several families. It has no state of its own.

    `module` is a module of transformers, whose attributes depend on its class, so it is untyped.
    """

    @property
    def classes(self) -> Set[str]:
        """Names of the module classes whose `forward` it replaces."""
        ...

    @property
    def has_kernels(self) -> bool:
        """Whether its step calls `LayerState.convolve` or `LayerState.recur`."""
        ...

    def shapes(self, module: Any) -> StateShapes:
        """The shapes of the parts of a module's state, of one request."""
        ...

    def step(self, module: Any, hidden: torch.Tensor, state: LayerState) -> Mixed:
        """What the module's `forward` returns for the tokens of a step, [tokens, ...].

        `hidden` is [tokens, width], the rows concatenated. Reads each part of the state once and
        writes it once. A token's result must depend on its own row alone, bit for bit, except in
        matrix products, which the checks of `deterministic` see to.
        """
        ...
