"""Packs weights for the kernels, and keeps them. Quantized weights stay as they are stored.

Knows no layer.
"""

import logging
from collections.abc import Callable

import torch

from engine.model.decoder.decoder_weights import DecoderWeights, Linear
from engine.model.device.slabs import Slabs
from engine.model.device.weight_files import WeightFiles
from engine.model.kernels.build import Variant
from engine.model.kernels.library import LinearStruct
from engine.model.kernels.packing import interleave, pack, pack_panels
from engine.model.kernels.quantized import QuantizedWeight, concatenated

#: The digits of the inputs of quantized weights (kernels/digit_rows.h), by the type of the model:
#: as many as the precision of the type needs.
DIGITS = {torch.float32: 3, torch.bfloat16: 2}
#: This unit multiplies bfloat16 faster than the others multiply integers.
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
        self._has_quantized = False
        self.digits = DIGITS[dtype]

    @property
    def form(self) -> str:
        """The part of a decoder's name that says how it multiplies quantized weights, if any."""
        return f"-int8x{self.digits}" if self._has_quantized else ""

    def close(self) -> None:
        """Share the last memory, if weights are shared."""
        self._slabs.close()

    def keep(self, tensor: torch.Tensor) -> int:
        """The address of a copy of a tensor, which lives as long as this object."""
        return self._slabs.keep(tensor).data_ptr()

    def floats(self, tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else self.keep(tensor.float())

    def linear(self, linear: Linear) -> LinearStruct:
        return self._packed(linear, lambda rows: rows)

    def gate_up(self, linear: Linear | None) -> LinearStruct:
        """Gates and ups in turns; a struct of zeros for none."""
        return LinearStruct() if linear is None else self._packed(linear, interleave)

    def embedding(self, weights: DecoderWeights) -> tuple[torch.Tensor | None, LinearStruct]:
        """The rows of the embedding, or None if they are packed; and what the kernels read."""
        if _is_tied(weights):
            return None, LinearStruct()
        linear = Linear(weights.embedding.contiguous(), stored=weights.stored_embedding)
        quantized = self._quantized(linear)
        if quantized is not None:
            return None, self._panels(quantized, self._struct(linear, lambda rows: rows))
        rows = self._slabs.keep(linear.weight) if self._shares else linear.weight
        return rows, LinearStruct(packed=rows.data_ptr())

    def _packed(
        self, linear: Linear, ordered: Callable[[torch.Tensor], torch.Tensor]
    ) -> LinearStruct:
        """A linear layer whose rows `ordered` brings into the order of the kernels."""
        struct = self._struct(linear, ordered)
        quantized = self._quantized(linear)
        if quantized is not None:
            return self._panels(quantized.select(ordered), struct)
        weight = ordered(linear.weight)
        struct.outputs, struct.packed = len(weight), self.keep(pack(weight))
        return struct

    def _struct(
        self, linear: Linear, ordered: Callable[[torch.Tensor], torch.Tensor]
    ) -> LinearStruct:
        bias = None if linear.bias is None else ordered(linear.bias[:, None])[:, 0]
        return LinearStruct(bias=self.floats(bias), inputs=linear.weight.shape[1])

    def _panels(self, quantized: QuantizedWeight, struct: LinearStruct) -> LinearStruct:
        struct.outputs, struct.packed = len(quantized.numbers), self.keep(pack_panels(quantized))
        struct.bits, struct.has_minima = quantized.bits, quantized.minima is not None
        self._has_quantized = True
        return struct

    def _quantized(self, linear: Linear) -> QuantizedWeight | None:
        """The stored form of a weight, if it is kept and has exactly the values of the weight."""
        if not linear.stored or not self._keeps_quantized:
            return None
        quantized = concatenated([part.unpacked() for part in linear.stored])
        if torch.equal(quantized.dequantized().to(linear.weight.dtype), linear.weight):
            return quantized
        logger.warning("a weight is not kept quantized: its blocks have other values")
        return None


def _is_tied(weights: DecoderWeights) -> bool:
    """Whether embedding and head are one tensor."""
    embedding, head = weights.embedding, weights.head.weight
    return embedding.data_ptr() == head.data_ptr() and embedding.shape == head.shape
