"""Reads weights in the formats of GPTQ and AWQ, and refuses what has another meaning.

In both, weight = scale * (number - zero point). The formulas are those of `dequantize_weight` of
GPTQModel (nn_modules/qlinear) and `dequantize_gemm` of AutoAWQ (utils/packing_utils.py):
https://github.com/ModelCloud/GPTQModel and https://github.com/casper-hansen/AutoAWQ.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.model.wide.note_fields import check_fields, check_value, is_size, refused_field
from engine.model.wide.scaled_numbers import ScaledNumbers, Unfit, scaled_integers, unpacked
from engine.model.wide.stored_tensors import StoredTensor

GPTQ, AWQ = "gptq", "awq"
#: Fields that say how weights were found, and how a GPU computes. Stored types show which modules
#: are not quantized.
HARMLESS = frozenset(
    {
        *("quant_method", "method", "sym", "static_groups", "true_sequential", "mse", "meta"),
        *("damp_percent", "damp_auto_increment", "act_group_aware", "hyb_act", "lm_head"),
        *("model_name_or_path", "model_file_base_name", "tokenizer", "dataset", "batch_size"),
        *("model_seqlen", "max_input_length", "pad_token_id", "cache_block_outputs"),
        *("block_name_to_quantize", "module_name_preceding_first_block"),
        *("modules_in_block_to_quantize", "modules_to_not_convert"),
        *("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config"),
        *("do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
    }
)
#: The names of a field in notes of different programs.
NAMES = {
    "bits": ("bits", "w_bit"),
    "group_size": ("group_size", "q_group_size"),
    "format": ("checkpoint_format", "format", "version"),
}
#: Backends that AWQ notes name; that of llm-awq packs otherwise.
AWQ_BACKENDS = ("autoawq", "auto", None)
#: The places of eight outputs in a word of AWQ, from the lowest bits.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class GroupedColumns:
    """The format of a checkpoint whose words run along the inputs (GPTQ) or the outputs (AWQ).

    Args:
        bits: of a number.
        group_size: inputs of a group; -1 for all.
        zero_offset: what is added to a stored zero point.
        needs_groups: whether the groups of inputs must be stored, since they are in any order.
        is_awq: whether words have numbers of eight outputs, in the order of AWQ.
    """

    bits: int
    group_size: int
    zero_offset: int
    needs_groups: bool
    is_awq: bool
    parts = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    unused = frozenset[str]()
    note_files = frozenset({"quantize_config.json", "quant_config.json"})

    def is_quantized(self, parts: Mapping[str, StoredTensor]) -> bool:
        """Whether tensors with these last parts of their names are a quantized weight."""
        return "qweight" in parts

    def unpack(self, parts: Mapping[str, torch.Tensor]) -> ScaledNumbers:
        """The weight of these tensors, by the last parts of their names. Unfit."""
        missing = {"qweight", "qzeros", "scales"} - parts.keys()
        if missing:
            raise Unfit(f"it has no {min(missing)}")
        words, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
        for name, tensor in (("qweight", words), ("qzeros", zeros)):
            if tensor.dtype != torch.int32 or tensor.dim() != 2:
                raise Unfit(f"its {name} is {tensor.dtype} {list(tensor.shape)}")
        numbers = _awq_numbers(words).T if self.is_awq else unpacked(words.T, self.bits)
        outputs, inputs = numbers.shape
        num_groups = 1 if self.group_size == -1 else -(-inputs // self.group_size)
        expected = [num_groups, outputs], [num_groups, -(-outputs * self.bits // 32)]
        if [list(scales.shape), list(zeros.shape)] != list(expected):
            raise Unfit(
                f"its scales are {list(scales.shape)} and its qzeros {list(zeros.shape)}, instead "
                f"of {expected[0]} and {expected[1]}"
            )
        return scaled_integers(
            numbers, self._zeros(zeros)[:, :outputs].T, scales.T, self._groups(parts, inputs)
        )

    def _zeros(self, words: torch.Tensor) -> torch.Tensor:
        """Zero points: [groups, outputs], int16."""
        stored = _awq_numbers(words) if self.is_awq else unpacked(words, self.bits)
        if self.zero_offset and int(stored.max()) == (1 << self.bits) - 1:
            raise Unfit(
                "it stores a zero point of -1 in qzeros, which programs read differently; the "
                "format gptq_v2 has none"
            )
        return stored.to(torch.int16) + self.zero_offset

    def _groups(self, parts: Mapping[str, torch.Tensor], inputs: int) -> torch.Tensor | None:
        """The group of each input."""
        groups = parts.get("g_idx")
        if groups is None:
            if self.needs_groups:
                raise Unfit("it has no g_idx, and config.json says that inputs have an order")
            size = inputs if self.group_size == -1 else self.group_size
            return torch.arange(inputs) // size
        if groups.dim() != 1 or groups.dtype not in {torch.int32, torch.int64}:
            raise Unfit(f"its g_idx is {groups.dtype} {list(groups.shape)}")
        return groups


def gptq(note: Mapping[str, Any]) -> GroupedColumns:
    """The format that a note of GPTQ describes.

    Raises:
        ModelRefused: names a field that is unknown, or whose value would change the weights.
    """
    checked = {"pack_dtype", "dynamic", "desc_act", "is_marlin_format", "adapter", "backend"}
    bits, size, form = _shared(GPTQ, note, checked, bits=(4, 8), formats=("gptq", "gptq_v2", None))
    check_value(GPTQ, "desc_act", note.get("desc_act", False), (False, True))
    overrides = note.get("dynamic") or {}
    if not isinstance(overrides, dict) or not all(key.startswith("-:") for key in overrides):
        raise refused_field(GPTQ, "dynamic", overrides, ("none", "modules that are left out"))
    return GroupedColumns(
        bits=bits,
        group_size=size,
        zero_offset=0 if form == "gptq_v2" else 1,
        needs_groups=note.get("desc_act", False),
        is_awq=False,
    )


def awq(note: Mapping[str, Any]) -> GroupedColumns:
    """The format that a note of AWQ describes.

    Raises:
        ModelRefused: names a field that is unknown, or whose value would change the weights.
    """
    checked = {"pack_dtype", "zero_point", "backend", "desc_act", "adapter"}
    bits, size, _ = _shared(AWQ, note, checked, bits=(4,), formats=("gemm", None))
    check_value(AWQ, "zero_point", note.get("zero_point", True), (True,))
    check_value(AWQ, "backend", note.get("backend"), AWQ_BACKENDS)
    check_value(AWQ, "desc_act", note.get("desc_act", False), (False,))
    return GroupedColumns(bits, size, zero_offset=0, needs_groups=False, is_awq=True)


def _shared(
    method: str,
    note: Mapping[str, Any],
    checked: set[str],
    *,
    bits: tuple[int, ...],
    formats: tuple[str | None, ...],
) -> tuple[int, int, object]:
    """Bits, inputs of a group, and the named format, from fields of both methods."""
    names = {name for given in NAMES.values() for name in given}
    check_fields(method, "", note, checked | names | HARMLESS)
    served: Mapping[str, tuple[object, ...]] = {"bits": bits, "format": formats}
    for field, values in served.items():
        for name in [name for name in NAMES[field] if name in note] or [field]:
            value = note.get(name)
            check_value(method, name, value.lower() if isinstance(value, str) else value, values)
    check_value(method, "pack_dtype", note.get("pack_dtype"), ("int32", None))
    check_value(method, "is_marlin_format", note.get("is_marlin_format"), (False, None))
    check_value(method, "adapter", note.get("adapter"), (None,))
    size = _named(note, "group_size")
    if type(size) is not int or not (is_size(size) or size == -1):
        raise refused_field(method, "group_size", size)
    return int(_named(note, "bits")), size, _named(note, "format")


def _named(note: Mapping[str, Any], field: str) -> Any:
    """The value of a field under the first of its names that the note has."""
    value = next((note[name] for name in NAMES[field] if name in note), None)
    return value.lower() if isinstance(value, str) else value


def _awq_numbers(words: torch.Tensor) -> torch.Tensor:
    """[rows, words * 8], uint8, in the order of the outputs."""
    places = torch.tensor(AWQ_ORDER).argsort()
    return unpacked(words, 4).view(*words.shape, 8)[..., places].flatten(1)
