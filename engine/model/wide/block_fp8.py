"""Checks FP8 weights that are stored in blocks, so that transformers can dequantize them.

Knows no model. A weight is stored as 8-bit floats, and a second tensor has the scale of each block
of it: weight = stored * scale. transformers infers the size of the blocks from the number of
scales, which is wrong where the last block is smaller than the others; such weights are refused.
"""

import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import FineGrainedFP8Config

from engine.errors import ModelRefused
from engine.model.wide.stored_tensors import StoredTensor

#: The field of config.json that describes such weights, and the method that it names.
NOTE, METHOD = "quantization_config", "fp8"
#: The fields of the note that leave the meaning of the weights as it is, with the values that do.
#: Models compute with the dequantized weights, so that it does not matter how a GPU would quantize
#: the inputs of products (`activation_scheme`).
KNOWN_VALUES: Mapping[str, Sequence[object]] = {
    "quant_method": (METHOD,),
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
    "dequantize": (False, True),
}
#: The fields that name modules whose weights are not quantized. Stored types show which these are.
NAMES_OF_MODULES = frozenset({"modules_to_not_convert", "ignored_layers"})
BLOCK_SIZE = "weight_block_size"

STORED_TYPE = "F8_E4M3"
SCALE_TYPES = frozenset({"F32", "F16", "BF16"})
SCALE_SUFFIX = "_scale_inv"
#: The library that transformers needs to load such weights, and how to install it.
LIBRARY = "accelerate"
EXTRA = "the extra `fp8`: pip install -c constraints.txt -e '.[fp8]'"


@dataclass(frozen=True, slots=True)
class BlockFP8:
    """The note of a checkpoint with FP8 weights in blocks.

    Args:
        rows: outputs of a block.
        columns: inputs of a block.
        note: the fields of the note.
    """

    rows: int
    columns: int
    note: Mapping[str, Any]

    def loading_config(self) -> FineGrainedFP8Config:
        """What `from_pretrained` needs to dequantize the weights into the model's type.

        Raises:
            ModelRefused: a library is missing.
        """
        if importlib.util.find_spec(LIBRARY) is None:
            raise ModelRefused(
                f"config.json describes FP8 weights in blocks, and {LIBRARY} is missing; it comes "
                f"with {EXTRA}"
            )
        return FineGrainedFP8Config(**{**self.note, "dequantize": True})

    def other_tensors(self, tensors: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
        """Check weights with their scales; returns all other tensors, which are not quantized.

        Raises:
            ModelRefused: names a weight whose scales are missing or do not fit it.
        """
        by_name = {tensor.name: tensor for tensor in tensors}
        scaled = {name for name, tensor in by_name.items() if tensor.dtype == STORED_TYPE}
        for name in sorted(scaled):
            self._check(by_name[name], by_name.get(name + SCALE_SUFFIX))
        scales = {name + SCALE_SUFFIX for name in scaled}
        return (by_name[name] for name in by_name.keys() - scaled - scales)

    def _check(self, weight: StoredTensor, scale: StoredTensor | None) -> None:
        if scale is None or scale.dtype not in SCALE_TYPES:
            raise ModelRefused(
                f"{weight.file} stores {weight.name} as {weight.dtype}, and the checkpoint has no "
                f"{weight.name}{SCALE_SUFFIX} of floats: download it again"
            )
        blocks = (self.rows, self.columns)
        if len(weight.shape) != 2 or not all(
            map(_divides, weight.shape, blocks, (*scale.shape, 0, 0))
        ):
            raise ModelRefused(
                f"{weight.file} stores {weight.name} {list(weight.shape)} in blocks of "
                f"{list(blocks)} with scales {list(scale.shape)}, which transformers cannot "
                "dequantize: use the checkpoint whose weights are not quantized (float32, float16 "
                "or bfloat16)"
            )


def block_fp8(config: Mapping[str, Any]) -> BlockFP8 | None:
    """The note of config.json about FP8 weights in blocks; None if there is none, or another one.

    Args:
        config: the JSON object of config.json.
    """
    note = config.get(NOTE)
    if not isinstance(note, dict) or note.get("quant_method") != METHOD:
        return None
    others = note.keys() - NAMES_OF_MODULES - {BLOCK_SIZE}
    if any(note[name] not in KNOWN_VALUES.get(name, ()) for name in others):
        return None
    size = note.get(BLOCK_SIZE)
    if not isinstance(size, list) or len(size) != 2:
        return None
    if not all(type(length) is int and length > 0 for length in size):
        return None
    return BlockFP8(size[0], size[1], note)


def cast_plain_weights(model: Any) -> None:
    """Convert the weights that were not quantized to the type of the model.

    transformers leaves them in the type in which they are stored if others are dequantized. Weights
    that transformers always keeps in float32 stay float32.

    Args:
        model: a PreTrainedModel, as `from_pretrained` with `BlockFP8.loading_config` returns it.
    """
    dtype = model.config.dtype
    kept = model._get_dtype_plan(dtype)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            matching = [kept[key] for key in kept if re.search(key.replace("*", ".*"), name)]
            parameter.data = parameter.data.to(matching[0] if matching else dtype)


def _divides(size: int, block: int, count: int) -> bool:
    """Whether `count` equal parts of `size` are its blocks; a single block may be smaller."""
    return count > 0 and count == -(-size // block) and (size % block == 0 or count == 1)
