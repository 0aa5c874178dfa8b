"""Reads the quantized weights of a folder by their definition, and makes a state dict of them.

Knows no model and no format: a format says which tensors are a weight, and what they stand for.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from engine.errors import ModelRefused
from engine.model.kernels.quantized import StoredWeight
from engine.model.wide.scaled_numbers import ScaledIntegers, ScaledNumbers, Unfit, is_finite
from engine.model.wide.stored_layers import keep_stored, stand_in
from engine.model.wide.stored_tensors import FindFile, StoredTensor

#: Names of the weights of one expert. transformers stacks those of all experts.
EXPERT = re.compile(r"\.experts\.\d+\.")
ADVICE = "download it again, or use the checkpoint whose weights are not quantized"


class WeightFormat(Protocol):
    """How a checkpoint stores its quantized weights."""

    @property
    def parts(self) -> frozenset[str]:
        """The last parts of the names of the tensors of a quantized weight."""
        ...

    @property
    def unused(self) -> frozenset[str]:
        """Those of tensors that no weight depends on."""
        ...

    @property
    def note_files(self) -> frozenset[str]:
        """Names of files beside config.json that repeat its note."""
        ...

    def is_quantized(self, parts: Mapping[str, StoredTensor]) -> bool:
        """Whether tensors with these last parts of their names are a quantized weight."""
        ...

    def unpack(self, parts: Mapping[str, torch.Tensor]) -> ScaledNumbers:
        """The weight of such tensors. Unfit, if they do not fit each other."""
        ...


@dataclass(frozen=True, slots=True)
class QuantizedTensors:
    """The tensors of a checkpoint.

    Args:
        weights: those of each quantized weight, by the last parts of their names; by the name of
            the weight without ".weight".
        plain: all others.
        form: how `weights` are stored.
    """

    weights: Mapping[str, Mapping[str, StoredTensor]]
    plain: Sequence[StoredTensor]
    form: WeightFormat


def sorted_tensors(tensors: Iterable[StoredTensor], form: WeightFormat) -> QuantizedTensors:
    """Find the tensors of quantized weights; those that are unused are left out."""
    by_owner: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for tensor in tensors:
        owner, _, part = tensor.name.rpartition(".")
        by_owner[owner][part] = tensor
    weights: dict[str, Mapping[str, StoredTensor]] = {}
    plain: list[StoredTensor] = []
    for owner, parts in by_owner.items():
        own = {part: tensor for part, tensor in parts.items() if part in form.parts}
        if form.is_quantized(own):
            weights[owner] = own
        else:
            own = {}
        others = parts.keys() - own.keys() - form.unused
        plain.extend(parts[part] for part in sorted(others))
    return QuantizedTensors(weights, plain, form)


#: A model and the loading report of transformers.
Loaded = tuple[PreTrainedModel, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ReadWeights:
    """All tensors of a checkpoint.

    Args:
        plain: those that are not quantized, by their names in it.
        quantized: the others, by the names that dequantized ones would have.
        files: the file of each of them.
        dtype: the type of the dequantized weights.
    """

    plain: Mapping[str, torch.Tensor]
    quantized: Mapping[str, ScaledNumbers]
    files: Mapping[str, str]
    dtype: torch.dtype

    def load(
        self, load: Callable[[Mapping[str, torch.Tensor]], Loaded], *, keeps: bool
    ) -> tuple[Loaded, Mapping[str, StoredWeight]]:
        """What `load` makes of a state dict, and the weights that its layers keep quantized.

        A parameter that lies where a stand-in lies is the weight that it stands for. So no renaming
        of transformers has to be known. What is copied, as into a stack of experts, is dequantized,
        and loaded once more.

        Args:
            load: gets the dequantized weights, and stand-ins for those that may be kept.
            keeps: whether any is kept.

        Raises:
            ModelRefused: a weight has values that are not finite.
        """
        kept = {
            name: weight
            for name, weight in self.quantized.items()
            # Most stacks are of experts, so those are not tried.
            if keeps and not EXPERT.search(name) and isinstance(weight, ScaledIntegers)
            if weight.can_be_kept
        }
        while True:
            state = self._state(kept)
            loaded = load(state)
            by_place = {_place(state[name]): name for name in kept}
            places = {name: _place(one) for name, one in loaded[0].state_dict().items()}
            found = {name: by_place[place] for name, place in places.items() if place in by_place}
            if kept.keys() == set(found.values()):
                stored = {name: kept[one] for name, one in found.items()}
                keep_stored(loaded[0], stored)
                return loaded, stored
            kept = {name: kept[name] for name in set(found.values())}

    def without_zero_biases(self, report: Mapping[str, Any]) -> Mapping[str, Any]:
        """A loading report, in which biases of quantized weights do not count if they are zero.

        AutoGPTQ stores a bias with each weight, also where the model has none.
        """
        left = [name for name in report["unexpected_keys"] if not self._is_zero_bias(name)]
        return {**report, "unexpected_keys": left}

    def _is_zero_bias(self, name: str) -> bool:
        owner, _, part = name.rpartition(".")
        return (
            part == "bias"
            and f"{owner}.weight" in self.quantized
            and name in self.plain
            and not bool(self.plain[name].any())
        )

    def _state(self, kept: Mapping[str, ScaledIntegers]) -> Mapping[str, torch.Tensor]:
        state = dict(self.plain)
        for name, weight in self.quantized.items():
            if name in kept:
                state[name] = stand_in(kept[name].shape, self.dtype)
                continue
            state[name] = weight.dequantized().to(self.dtype)
            if not is_finite(state[name]):
                raise _refused(self.files[name], name, "it has values that are not finite")
        return state


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def read_quantized(tensors: QuantizedTensors, find: FindFile, dtype: torch.dtype) -> ReadWeights:
    """Read all tensors. Dequantized weights will have the type `dtype`, rounded once.

    Raises:
        ModelRefused: names a weight whose tensors do not fit each other.
    """
    quantized: dict[str, ScaledNumbers] = {}
    files: dict[str, str] = {}
    with ExitStack() as stack:
        read = _reader(find, stack)
        plain = {tensor.name: read(tensor) for tensor in tensors.plain}
        for owner, stored in tensors.weights.items():
            name = f"{owner}.weight"
            files[name] = min(tensor.file for tensor in stored.values())
            if name in plain:
                raise _refused(files[name], name, "it is stored as weight, too")
            parts = {part: read(tensor) for part, tensor in stored.items()}
            empty = [part for part, tensor in parts.items() if not tensor.numel()]
            if empty:
                raise _refused(files[name], name, f"its {empty[0]} is empty")
            try:
                quantized[name] = tensors.form.unpack(parts)
            except Unfit as error:
                raise _refused(files[name], name, str(error)) from error
    return ReadWeights(plain, quantized, files, dtype)


def _reader(find: FindFile, stack: ExitStack) -> Callable[[StoredTensor], torch.Tensor]:
    """Reads tensors by mapping their files, which `stack` closes."""
    files: dict[str, Any] = {}

    def read(tensor: StoredTensor) -> torch.Tensor:
        try:
            if tensor.file not in files:
                file = find(tensor.file)
                assert file is not None, "the header of this file has been read"
                files[tensor.file] = stack.enter_context(safe_open(Path(file), framework="pt"))
            found: torch.Tensor = files[tensor.file].get_tensor(tensor.name)
        except (SafetensorError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ModelRefused(f"{tensor.file} cannot be read ({reason}): {ADVICE}") from error
        return found

    return read


def _refused(file: str, name: str, reason: str) -> ModelRefused:
    return ModelRefused(f"{file} stores the quantized weight {name}, but {reason}: {ADVICE}")
