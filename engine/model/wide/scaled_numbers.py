"""What quantized weights stand for: numbers times scales. Knows no format of checkpoints."""

import math
from dataclasses import dataclass, replace

import torch

from engine.model.kernels.quantized import GROUP, QuantizedWeight

#: Types of stored scales.
SCALE_TYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
#: Sizes of the numbers that the kernels multiply and that have one scale in a group, in bits.
KERNEL_BITS = (4, 5, 8)


class Unfit(Exception):
    """Tensors of a quantized weight do not fit each other; the message says which."""


@dataclass(frozen=True, slots=True)
class ScaledIntegers:
    """A weight [outputs, inputs]: an integer times the scale of its output and group of inputs.

    Args:
        integers: [outputs, inputs], int8 or, if one has more bits, int16. Zero points have been
            subtracted.
        scales: [outputs, groups], of a type in `SCALE_TYPES`.
        groups: [inputs], the group of each input. None for consecutive groups of one size.
    """

    integers: torch.Tensor
    scales: torch.Tensor
    groups: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.integers.shape)

    @property
    def bfloat16_digits(self) -> int:
        """Two: these formats define inputs of 16 bits."""
        return 2

    @property
    def can_be_kept(self) -> bool:
        """Whether the kernels have exactly the same values.

        Their scales are float16, for groups of 32 inputs. Zero points cost at most one bit, since
        a number minus a zero point of four bits has five.
        """
        has_groups = self.groups is None and self.shape[1] % (self.scales.shape[1] * GROUP) == 0
        scales = self.scales.float()
        is_half = torch.equal(self.scales.to(torch.float16).float(), scales)
        return has_groups and is_half and is_finite(scales) and self.integers.dtype == torch.int8

    def unpacked(self) -> QuantizedWeight:
        """The same values as the kernels multiply them; only if they can be kept."""
        assert self.can_be_kept
        low, high = (int(one) for one in self.integers.aminmax())
        bits = next(bits for bits in KERNEL_BITS if max(~low, high) < 1 << (bits - 1))
        numbers = self.integers.view(torch.uint8) + (1 << (bits - 1))
        repeats = self.shape[1] // (self.scales.shape[1] * GROUP)
        scales = self.scales.to(torch.float16).repeat_interleave(repeats, 1)
        return QuantizedWeight(numbers, scales, None, bits)

    def dequantized(self) -> torch.Tensor:
        """[outputs, inputs], float32. Products of float16 or bfloat16 scales are exact."""
        scales = self.scales.float()
        if self.groups is not None:
            return self.integers.float().mul_(scales[:, self.groups])
        split = self.integers.view(*scales.shape, -1).float()
        return split.mul_(scales[..., None]).flatten(1)

    def rows(self, chosen: slice | torch.Tensor) -> torch.Tensor:
        """The dequantized weights of some outputs, float32."""
        return replace(
            self, integers=self.integers[chosen], scales=self.scales[chosen]
        ).dequantized()


@dataclass(frozen=True, slots=True)
class ScaledFloats:
    """A weight [outputs, inputs]: a float of 8 bits times the scale of its block.

    Args:
        floats: [outputs, inputs], float8_e4m3fn.
        scales: [rows of blocks, columns of blocks], of a type in `SCALE_TYPES`.
        block: outputs and inputs of a block. The last ones may have fewer.
    """

    floats: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    def dequantized(self) -> torch.Tensor:
        """[outputs, inputs], float32."""
        (rows, columns), (outputs, inputs) = self.block, self.floats.shape
        scales = self.scales.float().repeat_interleave(columns, 1)[:, :inputs]
        return self.floats.float().mul_(scales.repeat_interleave(rows, 0)[:outputs])


ScaledNumbers = ScaledIntegers | ScaledFloats


def scaled_integers(
    numbers: torch.Tensor,
    zeros: torch.Tensor | int,
    scales: torch.Tensor,
    groups: torch.Tensor | None = None,
) -> ScaledIntegers:
    """A weight scale * (number - zero point), from its parts as they are stored.

    Args:
        numbers: [outputs, inputs], integers of at most 8 bits.
        zeros: [outputs, groups], or one for all.
        scales: [outputs, groups].
        groups: [inputs], the group of each input; None for consecutive groups of one size.

    Raises:
        Unfit: scales have no type of `SCALE_TYPES`, or an input has no group.
    """
    outputs, inputs = numbers.shape
    if scales.dtype not in SCALE_TYPES:
        raise Unfit(f"its scales are {scales.dtype}")
    num_groups = scales.shape[1]
    if groups is not None:
        groups = groups.long()
        if len(groups) != inputs or not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
            raise Unfit(f"its inputs have groups outside of the {num_groups} that have scales")
        if inputs % num_groups == 0 and torch.equal(groups, consecutive(num_groups, inputs)):
            groups = None
    integers = numbers.to(torch.int16).contiguous()
    if isinstance(zeros, int):
        integers = integers - zeros
    elif groups is not None:
        integers = integers - zeros.to(torch.int16)[:, groups]
    else:
        split = integers.view(outputs, num_groups, -1)
        integers = (split - zeros.to(torch.int16)[..., None]).flatten(1)
    low, high = (int(one) for one in integers.aminmax())
    if max(~low, high) < 1 << 7:
        integers = integers.to(torch.int8)
    return ScaledIntegers(integers, scales, groups)


def consecutive(num_groups: int, inputs: int) -> torch.Tensor:
    """[inputs]: the group of each input, where groups are consecutive; the last may be smaller."""
    return torch.arange(inputs) // math.ceil(inputs / num_groups)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers in the words of each row, those in the lowest bits first.

    Args:
        words: [rows, words], int32.
        bits: of a number, 4 or 8.

    Returns:
        [rows, words * 32 / bits], uint8.
    """
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def is_finite(values: torch.Tensor) -> bool:
    """Whether all values are numbers."""
    # Much faster than a look at each value; what is not a number is the least and the largest.
    return all(map(math.isfinite, values.aminmax()))
