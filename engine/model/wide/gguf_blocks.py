"""The blocks of GGUF files: where a model's weights are in the file, and what they hold.

The layout of blocks is that of ggml: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from transformers import PreTrainedConfig

from engine.model.kernels.quantized import QuantizedWeight, concatenated
from engine.model.wide.gguf_families import GgufArchitecture
from engine.model.wide.gguf_header import GgufHeader

#: Rows of each weight whose values are compared with those of the library gguf.
COMPARED_ROWS = 16
#: Elements that are unpacked at once.
UNPACKED_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A tensor as a GGUF file stores it.

    Args:
        kind: ggml's name of the type.
        blocks: [rows, bytes], uint8.
        shape: of the tensor, whose last dimension is a row.
    """

    kind: str
    blocks: torch.Tensor
    shape: tuple[int, ...]

    @property
    def bfloat16_digits(self) -> int:
        """One, as in the library that defines these types."""
        return 1

    @property
    def can_be_kept(self) -> bool:
        """Whether the kernels multiply it as it is."""
        return self.kind in KINDS and len(self.shape) == 2

    def unpacked(self) -> QuantizedWeight:
        """The numbers and scales of a type in `KINDS`."""
        # In slices: intermediate results are several times as large as the blocks.
        step = max(1, UNPACKED_ELEMENTS // self.shape[-1])
        slices = torch.split(self.blocks, step)
        return concatenated([KINDS[self.kind](blocks) for blocks in slices])

    def dequantized(self) -> torch.Tensor:
        """The tensor in float32."""
        return _dequantized(self.kind, self.blocks).view(self.shape)

    def rows(self, chosen: slice | torch.Tensor) -> torch.Tensor:
        """Some rows of a matrix in float32."""
        return _dequantized(self.kind, self.blocks[chosen])

    def is_finite(self) -> bool:
        """Whether all values are numbers."""
        if self.kind in KINDS:
            # A number times a finite scale of this type is finite in float32.
            size, first, count = FACTORS[self.kind]
            factors = _bytes(self.blocks, size, first)[..., : 2 * count].contiguous()
            return bool(factors.view(torch.float16).isfinite().all())
        # Much faster than a look at each value; what is not a number is the least and the largest.
        return all(map(math.isfinite, self.dequantized().aminmax()))

    def has_the_values_of_the_library(self) -> bool:
        """Whether the library gguf gives the same values, bit for bit, for rows from all parts."""
        if self.kind not in KINDS:
            return True
        rows = self.blocks[:: max(1, len(self.blocks) // COMPARED_ROWS)]
        return torch.equal(_dequantized(self.kind, rows), _by_library(self.kind, rows))


def _dequantized(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """[rows, elements], float32."""
    if kind in KINDS:
        return KINDS[kind](blocks).dequantized()
    return _by_library(kind, blocks)


def _by_library(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    from gguf import GGMLQuantizationType, dequantize

    values = dequantize(blocks.numpy(), GGMLQuantizationType[kind])
    # A copy: the library returns floats as they lie in the file.
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _halves(blocks: torch.Tensor, size: int, first: int) -> torch.Tensor:
    """[outputs, blocks]: the float16 at byte `first` of each block of `size` bytes."""
    split = blocks.view(len(blocks), -1, size)[..., first : first + 2]
    return split.contiguous().view(torch.float16)[..., 0]


def _bytes(blocks: torch.Tensor, size: int, first: int) -> torch.Tensor:
    """[outputs, blocks, bytes]: what is in each block from byte `first` on."""
    return blocks.view(len(blocks), -1, size)[..., first:]


def _half_bytes(values: torch.Tensor) -> torch.Tensor:
    """The low halves of the bytes of a block, then the high ones."""
    return torch.cat((values & 15, values >> 4), dim=-1)


def _split(values: torch.Tensor, size: int) -> torch.Tensor:
    """The last dimension in parts of `size`."""
    return values.reshape(*values.shape[:-1], -1, size)


def _q8_0(blocks: torch.Tensor) -> QuantizedWeight:
    # Adding 128 modulo 256 turns signed bytes into numbers.
    numbers = _bytes(blocks, 34, 2) ^ 128
    return QuantizedWeight(numbers.flatten(1), _halves(blocks, 34, 0), None, 8)


def _q4_0(blocks: torch.Tensor) -> QuantizedWeight:
    numbers = _half_bytes(_bytes(blocks, 18, 2))
    return QuantizedWeight(numbers.flatten(1), _halves(blocks, 18, 0), None, 4)


def _q4_1(blocks: torch.Tensor) -> QuantizedWeight:
    numbers = _half_bytes(_bytes(blocks, 20, 4))
    return QuantizedWeight(numbers.flatten(1), _halves(blocks, 20, 0), _halves(blocks, 20, 2), 4)


def _with_fifth_bits(values: torch.Tensor) -> torch.Tensor:
    """Numbers of 5 bits: their fifth bits are in four bytes before the others."""
    places = torch.arange(8, dtype=torch.uint8)
    fifth = (values[..., :4, None] >> places & 1).flatten(-2)
    return _half_bytes(values[..., 4:]) | fifth << 4


def _q5_0(blocks: torch.Tensor) -> QuantizedWeight:
    numbers = _with_fifth_bits(_bytes(blocks, 22, 2))
    return QuantizedWeight(numbers.flatten(1), _halves(blocks, 22, 0), None, 5)


def _q5_1(blocks: torch.Tensor) -> QuantizedWeight:
    numbers = _with_fifth_bits(_bytes(blocks, 24, 4))
    return QuantizedWeight(numbers.flatten(1), _halves(blocks, 24, 0), _halves(blocks, 24, 2), 5)


def _nested(blocks: torch.Tensor, size: int, numbers: torch.Tensor, bits: int) -> QuantizedWeight:
    """Blocks of 256 that begin with two factors, and eight scales and minima of 6 bits."""
    values = _bytes(blocks, size, 4)
    scales, minima, rest = values[..., :4], values[..., 4:8], values[..., 8:12]
    scales = torch.cat((scales & 63, rest & 15 | scales >> 2 & 48), dim=-1)
    minima = torch.cat((minima & 63, rest >> 4 | minima >> 2 & 48), dim=-1)
    return QuantizedWeight(
        numbers=numbers.flatten(1),
        scales=scales.view(torch.int8).flatten(1),
        minima=minima.view(torch.int8).flatten(1),
        bits=bits,
        scale_factors=_halves(blocks, size, 0),
        # Minima are subtracted in such a block.
        minimum_factors=-_halves(blocks, size, 2),
    )


def _q4_k(blocks: torch.Tensor) -> QuantizedWeight:
    numbers = _half_bytes(_split(_bytes(blocks, 144, 16), 32))
    return _nested(blocks, 144, numbers, 4)


def _q5_k(blocks: torch.Tensor) -> QuantizedWeight:
    low = _half_bytes(_split(_bytes(blocks, 176, 48), 32)).flatten(-2)
    # A byte has the fifth bits of its place in all eight groups.
    fifth = _bytes(blocks, 176, 16)[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]
    return _nested(blocks, 176, low | (fifth & 1).flatten(-2) << 4, 5)


def _q6_k(blocks: torch.Tensor) -> QuantizedWeight:
    values = _bytes(blocks, 210, 0)
    low = _half_bytes(_split(values[..., :128], 64))
    places = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = _split(values[..., 128:192], 32)[..., None, :] >> places & 3
    return QuantizedWeight(
        numbers=(low | high.flatten(-2) << 4).flatten(1),
        scales=values[..., 192:208].view(torch.int8).flatten(1),
        minima=None,
        bits=6,
        scale_factors=_halves(blocks, 210, 208),
    )


#: The types that are kept as stored, by ggml's name.
KINDS: Mapping[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
#: Of these types, the bytes of a block, the first byte of its float16 factors, and their number.
FACTORS: Mapping[str, tuple[int, int, int]] = {
    "Q8_0": (34, 0, 1),
    "Q4_0": (18, 0, 1),
    "Q4_1": (20, 0, 2),
    "Q5_0": (22, 0, 1),
    "Q5_1": (24, 0, 2),
    "Q4_K": (144, 0, 2),
    "Q5_K": (176, 0, 2),
    "Q6_K": (210, 208, 1),
}


def stored_blocks(
    header: GgufHeader, file: Path, architecture: GgufArchitecture, config: PreTrainedConfig
) -> Mapping[str, StoredBlocks]:
    """Each tensor that has a name in the model's state dict, by this name, with rows in its order.

    They are views of the mapped file, which nothing reads before they are unpacked.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    data = torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="c"))
    found: dict[str, StoredBlocks] = {}
    for tensor in header.tensors:
        name = architecture.name_of(tensor.name)
        if name is None:
            continue
        kind = GGMLQuantizationType(tensor.ggml_type)
        elements, size = GGML_QUANT_SIZES[kind]
        rows, row_bytes = math.prod(tensor.shape[1:]), tensor.shape[0] // elements * size
        begin = header.data_start + tensor.offset
        blocks = data[begin : begin + rows * row_bytes].view(rows, row_bytes)
        num_heads = architecture.num_paired_heads(tensor.name, config)
        if num_heads is not None:
            blocks = _halves_of_heads(blocks, num_heads)
        found[name] = StoredBlocks(kind.name, blocks, tensor.shape[::-1])
    return MappingProxyType(found)


def _halves_of_heads(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of pairs that are rotated together, as transformers has them: first all first ones."""
    pairs = rows.view(num_heads, -1, 2, rows.shape[1])
    return pairs.transpose(1, 2).reshape(rows.shape)
