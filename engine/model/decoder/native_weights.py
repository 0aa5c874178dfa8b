"""Packs weights for the kernels, and keeps them. Quantized weights stay as they are stored.

Knows no layer.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import torch

from engine.model.decoder.decoder_weights import DecoderWeights, Linear
from engine.model.device.one_thread import one_thread
from engine.model.device.slabs import Slabs
from engine.model.device.weight_files import WeightFiles
from engine.model.kernels.build import Variant
from engine.model.kernels.library import LinearStruct, PanelsStruct
from engine.model.kernels.packing import LANES, PANEL, interleave, pack, pack_panels
from engine.model.kernels.quantized import QuantizedWeight, concatenated, joined

#: The digits of inputs of quantized weights (kernels/digit_rows.h) that have the precision of
#: float32.
FLOAT32_DIGITS = 3
#: Elements of quantized weights that are packed at once.
PACKED_ELEMENTS = 1 << 20
#: The unit that multiplies bfloat16 faster than others multiply integers.
MATRIX_UNIT = "amx_bf16"

logger = logging.getLogger(__name__)


class PackedWeights:
    """The memory of all weights of a decoder.

    Args:
        variant: the instruction set of the kernels.
        dtype: the type of all weights that are not quantized.
        files: as in `Slabs`.
    """

    def __init__(self, variant: Variant, dtype: torch.dtype, files: WeightFiles | None) -> None:
        self._slabs = Slabs(files)
        self._shares = files is not None
        self._keeps_quantized = not (variant.name == MATRIX_UNIT and dtype == torch.bfloat16)
        self._parts: list[object] = []
        self._is_float32 = dtype == torch.float32
        #: All numbers of digits that inputs of quantized weights have, with an "o" before those
        #: that the output layer of a mixer raises.
        self._digits: set[str] = set()

    @property
    def form(self) -> str:
        """The part of a decoder's name that says how it multiplies quantized weights, if any."""
        return "-int8x" + "-".join(sorted(self._digits)) if self._digits else ""

    def close(self) -> None:
        """Share the last memory, if weights are shared."""
        self._slabs.close()

    def keep(self, tensor: torch.Tensor) -> int:
        """The address of a copy of a tensor, which lives as long as this object."""
        return self._slabs.keep(tensor).data_ptr()

    def floats(self, tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else self.keep(tensor.float())

    def linear(self, linear: Linear, least_digits: int = 1) -> LinearStruct:
        """A layer; `least_digits` of its inputs if its weights are quantized."""
        struct, quantized = self._struct(linear), _in_panels(self._quantized(linear))
        if quantized:
            return self._panels(quantized, struct, _digits(linear), least_digits)
        return self._strips(linear.values, struct)

    def gate_up(self, linear: Linear | None) -> LinearStruct:
        """Gates and ups in turns; a struct of zeros for none."""
        if linear is None:
            return LinearStruct()
        bias = None if linear.bias is None else interleave(linear.bias[:, None])[:, 0]
        struct = self._struct(replace(linear, bias=bias))
        parts = self._quantized(linear)
        # A panel has both, so they must have one form.
        quantized = joined(parts) if parts else None
        if quantized is not None:
            return self._panels([quantized.select(interleave)], struct, _digits(linear))
        if parts:
            logger.info("gates and ups of different types are dequantized")
        return self._strips(interleave(linear.values), struct)

    def embedding(self, weights: DecoderWeights) -> tuple[torch.Tensor | None, LinearStruct]:
        """The rows of the embedding, or None if they are packed; and what the kernels read."""
        if _is_tied(weights):
            return None, LinearStruct()
        linear = Linear(weights.embedding, stored=weights.stored_embedding)
        quantized = self._quantized(linear)
        if quantized:
            return None, self._panels(quantized, self._struct(linear), _digits(linear))
        rows = linear.values.contiguous()
        rows = self._slabs.keep(rows) if self._shares else rows
        return rows, LinearStruct(packed=rows.data_ptr())

    def _struct(self, linear: Linear) -> LinearStruct:
        outputs, inputs = linear.weight.shape
        return LinearStruct(bias=self.floats(linear.bias), inputs=inputs, outputs=outputs)

    def _strips(self, weight: torch.Tensor, struct: LinearStruct) -> LinearStruct:
        struct.outputs, struct.packed = len(weight), self.keep(pack(weight))
        return struct

    def _panels(
        self,
        parts: Sequence[QuantizedWeight],
        struct: LinearStruct,
        digits: int,
        least_digits: int = 1,
    ) -> LinearStruct:
        panels = (PanelsStruct * len(parts))()
        for panel, part in zip(panels, parts, strict=True):
            panel.packed = self._packed_panels(part)
            panel.num_strips = -(-len(part.numbers) // LANES)
            panel.bits, panel.has_minima, panel.is_nested = part.form
        struct.outputs = sum(len(part.numbers) for part in parts)
        struct.parts, struct.num_parts = panels, len(parts)
        own = FLOAT32_DIGITS if self._is_float32 else digits
        struct.digits = max(own, least_digits)
        self._digits.add(f"o{least_digits}" if least_digits > own else str(own))
        self._parts.append(panels)
        return struct

    @one_thread()
    def _packed_panels(self, weight: QuantizedWeight) -> int:
        """The address of all panels. They are packed in slices: the copies stay in the cache."""
        outputs, inputs = weight.numbers.shape
        step = max(1, PACKED_ELEMENTS // (PANEL * inputs)) * PANEL
        memory, end = torch.empty(0, dtype=torch.uint8), 0
        for first in range(0, outputs, step):
            rows = slice(first, first + step)
            packed = pack_panels(weight.select(itemgetter(rows)))
            if first == 0:
                memory = self._slabs.reserve(-(-outputs // PANEL) * packed.shape[1])
            memory[end : end + packed.numel()] = packed.flatten()
            end += packed.numel()
        return memory.data_ptr()

    @one_thread()
    def _quantized(self, linear: Linear) -> Sequence[QuantizedWeight]:
        """The stored forms of the rows of a weight; empty if there are none or none is kept."""
        if not self._keeps_quantized:
            return ()
        return [part.unpacked() for part in linear.stored]


def _digits(linear: Linear) -> int:
    """Those of its inputs in bfloat16: the most that a part of it asks for."""
    return max(part.bfloat16_digits for part in linear.stored)


def _in_panels(parts: Sequence[QuantizedWeight]) -> Sequence[QuantizedWeight]:
    """The same rows, in parts of one form that have whole panels; empty if there are none."""
    of_forms = [concatenated(list(group)) for _, group in groupby(parts, lambda part: part.form)]
    if any(len(part.numbers) % PANEL for part in of_forms[:-1]):
        whole = joined(parts)
        if whole is None:
            logger.info("rows of different types in one product are dequantized")
            return ()
        return (whole,)
    return of_forms


def _is_tied(weights: DecoderWeights) -> bool:
    """Whether embedding and head are one tensor."""
    embedding, head = weights.embedding, weights.head.weight
    return embedding.data_ptr() == head.data_ptr() and embedding.shape == head.shape
