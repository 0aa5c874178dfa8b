"""Quantized weights as numbers and scales, in the forms that the kernels multiply.

Knows no file format. The kernels are in kernels/panels.h.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

#: Inputs that share a scale; GROUP in kernels/digit_rows.h.
GROUP = 32


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [outputs, inputs]: scale * (number - 2^(bits - 1)), or scale * number + minimum.

    Args:
        numbers: [outputs, inputs], uint8, less than 2^bits.
        scales: [outputs, inputs / GROUP], float16, finite.
        minima: as `scales`; None for none.
        bits: 4 or 8.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    bits: int

    def dequantized(self) -> torch.Tensor:
        """[outputs, inputs], float32."""
        numbers = self.numbers.view(*self.scales.shape, GROUP).float()
        scales = self.scales.float()[..., None]
        if self.minima is None:
            values = scales * (numbers - (1 << (self.bits - 1)))
        else:
            values = scales * numbers + self.minima.float()[..., None]
        return values.flatten(1)

    def select(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> "QuantizedWeight":
        """The same weight with other rows: what `rows` makes of each of its tensors."""
        minima = None if self.minima is None else rows(self.minima)
        return replace(self, numbers=rows(self.numbers), scales=rows(self.scales), minima=minima)

    def with_minima(self) -> "QuantizedWeight":
        """The same values; a minimum is a power of two times its scale, so it is exact."""
        if self.minima is not None:
            return self
        return replace(self, minima=-(1 << (self.bits - 1)) * self.scales)

    def with_8_bits(self) -> "QuantizedWeight":
        """The same values, with numbers of 8 bits."""
        if self.bits == 8:
            return self
        offset = 128 - 8 if self.minima is None else 0
        return replace(self, numbers=self.numbers + offset, bits=8)


def concatenated(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """All rows of some weights, in a form that has the values of each of them."""
    if any(part.minima is not None for part in parts):
        parts = [part.with_minima() for part in parts]
    if any(part.bits == 8 for part in parts):
        parts = [part.with_8_bits() for part in parts]
    minima = [part.minima for part in parts if part.minima is not None]
    return QuantizedWeight(
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minima) if minima else None,
        parts[0].bits,
    )
