"""Quantized weights as numbers and scales, in the forms that the kernels multiply.

Knows no file format. The kernels are in kernels/panels.h.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from typing import Any, Protocol

import torch

#: Inputs of a group; GROUP in kernels/digit_rows.h.
GROUP = 32
#: Groups that share the factors of nested scales; NESTED_GROUPS in kernels/panels.h.
NESTED_GROUPS = 8


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [outputs, inputs]: scale * (number - 2^(bits - 1)), or scale * number + minimum.

    Args:
        numbers: [outputs, inputs], uint8, less than 2^bits.
        scales: [outputs, inputs / GROUP], or twice as many with 6 bits: one for each half of a
            group. float16 and finite, or int8 if they are nested.
        minima: [outputs, inputs / GROUP], of the same type; None for none, as with 6 bits.
        bits: 4, 5, 6 or 8.
        scale_factors: [outputs, inputs / GROUP / NESTED_GROUPS], float16: what nested scales are
            multiplied by. None if they are not nested.
        minimum_factors: the same for nested minima.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    bits: int
    scale_factors: torch.Tensor | None = None
    minimum_factors: torch.Tensor | None = None

    @property
    def form(self) -> tuple[int, bool, bool]:
        """What must be equal in a panel: the bits, and whether it has minima and is nested."""
        return self.bits, self.minima is not None, self.scale_factors is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """[outputs, inputs]."""
        return tuple(self.numbers.shape)

    @property
    def bfloat16_digits(self) -> int:
        """One: whoever quantizes a float model at load wants speed."""
        return 1

    def unpacked(self) -> "QuantizedWeight":
        """Itself: it is a `StoredWeight` in memory."""
        return self

    def rows(self, chosen: slice | torch.Tensor) -> torch.Tensor:
        """The dequantized weights of some outputs, float32."""
        return self.select(itemgetter(chosen)).dequantized()

    def dequantized(self) -> torch.Tensor:
        """[outputs, inputs], float32."""
        scales = _products(self.scales, self.scale_factors)[..., None]
        numbers = self.numbers.view(*self.scales.shape, -1).float()
        if self.minima is None:
            return (scales * (numbers - (1 << (self.bits - 1)))).flatten(1)
        return (scales * numbers + _products(self.minima, self.minimum_factors)[..., None]).flatten(
            1
        )

    def select(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> "QuantizedWeight":
        """The same weight with other rows: what `rows` makes of each of its tensors."""
        chosen: dict[str, Any] = {name: rows(one) for name, one in self.tensors().items()}
        return replace(self, **chosen)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that there are, by the names of their fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def with_minima(self) -> "QuantizedWeight":
        """The same values; a minimum is a power of two times its scale: exact, or infinite."""
        if self.minima is not None:
            return self
        return replace(self, minima=-(1 << (self.bits - 1)) * self.scales)

    def with_8_bits(self) -> "QuantizedWeight":
        """The same values, with numbers of 8 bits."""
        offset = 128 - (1 << (self.bits - 1)) if self.minima is None else 0
        return replace(self, numbers=self.numbers + offset, bits=8)


class StoredWeight(Protocol):
    """A weight [outputs, inputs] as it is stored."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def bfloat16_digits(self) -> int:
        """The digits of 8 bits that inputs get in bfloat16: see kernels/digit_rows.h."""
        ...

    def unpacked(self) -> QuantizedWeight:
        """Its numbers and scales, as the kernels multiply them."""
        ...

    def dequantized(self) -> torch.Tensor:
        """[outputs, inputs], float32."""
        ...

    def rows(self, chosen: slice | torch.Tensor) -> torch.Tensor:
        """The dequantized weights of some outputs, float32."""
        ...


def _products(values: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Scales or minima in float32, in which products with factors are exact."""
    if factors is None:
        return values.float()
    return (values.float().view(*factors.shape, -1) * factors.float()[..., None]).flatten(1)


def concatenated(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """All rows of weights that have one form."""
    assert len({part.form for part in parts}) == 1
    if len(parts) == 1:
        return parts[0]
    tensors = [part.tensors() for part in parts]
    whole: dict[str, Any] = {name: torch.cat([one[name] for one in tensors]) for name in tensors[0]}
    return replace(parts[0], **whole)


def joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """All rows of some weights, in a form that has the values of each; None if there is none."""
    if len({part.form for part in parts}) > 1:
        if any(part.scale_factors is not None for part in parts):
            return None
        if any(part.minima is not None for part in parts):
            parts = [part.with_minima() for part in parts]
            if any(bool(part.minima.isinf().any()) for part in parts if part.minima is not None):
                return None
        if len({part.bits for part in parts}) > 1:
            parts = [part.with_8_bits() for part in parts]
    return concatenated(parts)
