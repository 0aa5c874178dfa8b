"""Adapters on the wide path: hooks on the linear layers that an adapter changes.

Knows no architecture. A hook identifies tokens by their index in the step, so it must get all
tokens in order. A layer that gets only some of them, for instance one of a mixture of experts,
cannot have an adapter.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from engine.errors import ModelRefused
from engine.model.adapters import Adapter, LowRank
from engine.model.causal_model import AdaptedTokens, StepInputs

#: A forward hook of torch: gets the module, its arguments and its output.
Hook = Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]


@dataclass(slots=True)
class _Target:
    """One linear layer, its update by each adapter, and the number of calls in this step."""

    name: str
    parts: dict[str, LowRank] = field(default_factory=dict)
    num_calls: int = 0


class AdapterHooks:
    """The hooks of all adapters on one model; outside of `active` they add nothing."""

    def __init__(self, model: nn.Module, adapters: Sequence[Adapter]) -> None:
        self._active: Sequence[AdaptedTokens] = ()
        self._num_tokens = 0
        targets: dict[str, _Target] = {}
        for adapter in adapters:
            for name, part in adapter.layers.items():
                targets.setdefault(name, _Target(name)).parts[adapter.name] = part
        self._targets = list(targets.values())
        for target in self._targets:
            model.get_submodule(target.name).register_forward_hook(self._hook_of(target))

    @contextmanager
    def active(self, inputs: StepInputs) -> Iterator[None]:
        """Apply the adapters of a step to the forward pass inside.

        Raises:
            ModelRefused: a layer did not get each token once.
        """
        if not inputs.adapted:
            yield
            return
        for target in self._targets:
            target.num_calls = 0
        self._active, self._num_tokens = inputs.adapted, len(inputs.token_ids)
        try:
            yield
        finally:
            self._active = ()
        for target in self._targets:
            if target.num_calls != 1:
                raise _refused(target)

    def _hook_of(self, target: _Target) -> Hook:
        def add(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            if not self._active:
                return
            hidden = inputs[0].flatten(0, -2)
            if len(hidden) != self._num_tokens:
                raise _refused(target)
            target.num_calls += 1
            rows = output.view(len(hidden), -1)
            for adapter, tokens in self._active:
                part = target.parts.get(adapter)
                if part is not None:
                    rows.index_add_(0, tokens, part.added(hidden[tokens]))

        return add


def _refused(target: _Target) -> ModelRefused:
    return ModelRefused(f"{target.name} cannot have an adapter: it does not get each token once")
