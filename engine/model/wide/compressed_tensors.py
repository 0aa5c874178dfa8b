"""Reads weights in the formats of compressed-tensors, and refuses what has another meaning.

The formula is that of its functions `dequantize` and `unpack_from_int32`: weight = scale * (number
- zero point), with numbers of 4 or 8 bits that are stored with an offset where they are packed.
https://github.com/vllm-project/compressed-tensors, lifecycle/forward.py and pack_quantized.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.model.wide.note_fields import check_fields, check_value, is_size, refused_field
from engine.model.wide.scaled_numbers import (
    SCALE_TYPES,
    ScaledFloats,
    ScaledNumbers,
    Unfit,
    scaled_integers,
    unpacked,
)
from engine.model.wide.stored_tensors import StoredTensor

METHOD = "compressed-tensors"
#: Formats whose weights are a tensor of numbers and a tensor of scales.
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
#: Of a checkpoint, also the mixture of these. Each group then names its own.
WHOLE_FORMATS = (*FORMATS, "mixed-precision")
#: Fields that leave the meaning of the weights as it is. Stored types show which modules are not
#: quantized, and which group of the note a weight belongs to.
HARMLESS = frozenset({"quant_method", "global_compression_ratio", "ignore", "version"})
HARMLESS_OF_READERS = frozenset({"run_compressed", "dequantize", "use_optimized_inference"})
HARMLESS_OF_WEIGHTS = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})
STATUSES = ("compressed", "frozen")
#: How scales are shared, by the type of the numbers.
#: Orders in which weights were quantized: those that leave groups consecutive, and the others.
ORDERS, ORDERED = (None, False, "weight", "static"), (True, "group", "dynamic")
STRATEGIES_OF = {
    "int": ("tensor", "channel", "group"),
    "float": ("tensor", "channel", "group", "block"),
}
#: Tensors for rounded inputs, outputs and KV. Models compute with floats, and do not read them.
OF_ACTIVATIONS = frozenset(
    f"{kind}_{part}" for kind in ("input", "output") for part in ("scale", "zero_point")
)
OF_CACHES = frozenset({"q_scale", "k_scale", "v_scale"})


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of one group are quantized.

    Args:
        bits: of a number.
        group_size: inputs that share a scale, with the strategy `group`.
        block: outputs and inputs that share one, with the strategy `block`.
        is_ordered: whether `weight_g_idx` names the group of each input.
    """

    is_float: bool
    bits: int
    is_symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int]
    is_ordered: bool = False

    def fits_scales(self, scales: torch.Tensor, outputs: int, inputs: int) -> bool:
        """Whether the shape of `scales`, which has two dimensions, is that of the strategy."""
        rows, columns = self.block
        expected = {
            "tensor": (1, 1),
            "channel": (outputs, 1),
            "group": (outputs, -(-inputs // self.group_size)),
            "block": (-(-outputs // rows), -(-inputs // columns)),
        }[self.strategy]
        return tuple(scales.shape) == expected and (
            self.strategy != "group" or inputs % self.group_size == 0
        )


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The format of a checkpoint. A weight has the first of the schemes that its tensors fit.

    Args:
        schemes: those of all groups of the note.
        unused: last parts of the names of tensors that no weight depends on.
    """

    schemes: tuple[Scheme, ...]
    unused: frozenset[str]
    parts = frozenset(
        f"weight{part}" for part in ("", "_packed", "_shape", "_scale", "_zero_point", "_g_idx")
    )
    note_files = frozenset[str]()

    def is_quantized(self, parts: Mapping[str, StoredTensor]) -> bool:
        """Whether tensors with these last parts of their names are a quantized weight."""
        weight = parts.get("weight")
        return "weight_packed" in parts or (
            weight is not None and "weight_scale" in parts and weight.dtype in {"I8", "F8_E4M3"}
        )

    def unpack(self, parts: Mapping[str, torch.Tensor]) -> ScaledNumbers:
        """The weight of these tensors, by the last parts of their names. Unfit."""
        if "weight_scale" not in parts:
            raise Unfit("it has no weight_scale")
        scales = _matrix(parts["weight_scale"])
        if "weight_packed" in parts:
            if "weight" in parts:
                raise Unfit("it is stored as weight, too")
            return self._packed(parts, scales)
        weight = parts["weight"]
        if weight.dim() != 2:
            raise Unfit(f"its shape is {list(weight.shape)}")
        if weight.dtype == torch.int8:
            scheme = self._scheme(scales, *weight.shape, is_float=False)
            zeros = _zeros(parts, scheme, scales)
            return scaled_integers(
                weight, zeros, _rows(scales, len(weight)), _groups(parts, scheme)
            )
        scheme = self._scheme(scales, *weight.shape, is_float=True)
        if scales.dtype not in SCALE_TYPES or parts.keys() & {"weight_zero_point", "weight_g_idx"}:
            raise Unfit(f"floats with scales of {scales.dtype} and zero points or g_idx")
        outputs, inputs = weight.shape
        rows, columns = scheme.block
        if scheme.strategy != "block":
            rows, columns = -(-outputs // len(scales)), -(-inputs // scales.shape[1])
        # A block may be larger than the weight, but not its repeated scales.
        return ScaledFloats(weight, scales, (min(rows, outputs), min(columns, inputs)))

    def _packed(self, parts: Mapping[str, torch.Tensor], scales: torch.Tensor) -> ScaledNumbers:
        packed, shape = parts["weight_packed"], parts.get("weight_shape")
        if packed.dtype != torch.int32 or packed.dim() != 2:
            raise Unfit(f"its weight_packed is {packed.dtype} {list(packed.shape)}")
        if shape is None or shape.dtype not in {torch.int64, torch.int32} or shape.numel() != 2:
            raise Unfit("it has no weight_shape of two integers")
        outputs, inputs = (int(size) for size in shape.flatten())
        if outputs != len(packed) or inputs < 1:
            raise Unfit(
                f"its weight_shape is {[outputs, inputs]}, and {len(packed)} rows are packed"
            )
        words = packed.shape[1]
        scheme = self._scheme(scales, outputs, inputs, is_float=False, words=words)
        numbers = unpacked(packed, scheme.bits)[:, :inputs]
        # Numbers and zero points have the same offset; without zero points it is the zero point.
        zeros = _zeros(parts, scheme, scales, offset=1 << (scheme.bits - 1))
        return scaled_integers(numbers, zeros, _rows(scales, outputs), _groups(parts, scheme))

    def _scheme(
        self,
        scales: torch.Tensor,
        outputs: int,
        inputs: int,
        *,
        is_float: bool,
        words: int | None = None,
    ) -> Scheme:
        for scheme in self.schemes:
            is_kind = scheme.is_float == is_float
            if is_kind and words not in {None, -(-inputs * scheme.bits // 32)}:
                continue
            if is_kind and scheme.fits_scales(scales, outputs, inputs):
                return scheme
        packed = "" if words is None else f", in rows of {words} words,"
        raise Unfit(
            f"no group of quantization_config describes a weight {[outputs, inputs]}{packed} with "
            f"scales {list(scales.shape)}"
        )


def compressed_tensors(note: Mapping[str, Any]) -> CompressedTensors:
    """The format that a note of config.json describes.

    Raises:
        ModelRefused: names a field that is unknown, or whose value would change the weights.
    """
    read = {"format", "quantization_status", "config_groups", "kv_cache_scheme"}
    checked = {"sparsity_config", "transform_config"}
    check_fields(METHOD, "", note, read | checked | HARMLESS | HARMLESS_OF_READERS)
    check_value(METHOD, "format", note.get("format"), WHOLE_FORMATS)
    status = note.get("quantization_status", STATUSES[0])
    check_value(METHOD, "quantization_status", status, STATUSES)
    sparsity = note.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") != "dense"):
        raise refused_field(METHOD, "sparsity_config", sparsity, ("none", "the format dense"))
    if note.get("transform_config"):
        raise refused_field(METHOD, "transform_config", note["transform_config"], ("none",))
    groups = note.get("config_groups")
    if not isinstance(groups, dict):
        raise refused_field(METHOD, "config_groups", groups)
    unused = OF_ACTIVATIONS | (OF_CACHES if note.get("kv_cache_scheme") else frozenset())
    return CompressedTensors(tuple(_schemes(groups)), unused)


def _schemes(groups: Mapping[str, Any]) -> Iterator[Scheme]:
    for name, group in groups.items():
        where = f"config_groups.{name}"
        if not isinstance(group, dict):
            raise refused_field(METHOD, where, group)
        known = {"targets", "weights", "input_activations", "output_activations", "format"}
        check_fields(METHOD, where, group, known)
        check_value(METHOD, f"{where}.format", group.get("format", None), (*FORMATS, None))
        if group.get("weights") is not None:
            yield _scheme(group["weights"], f"{where}.weights")


def _scheme(weights: Any, where: str) -> Scheme:
    if not isinstance(weights, dict):
        raise refused_field(METHOD, where, weights)
    shape = {"strategy", "group_size", "block_structure"}
    known = {"num_bits", "type", "symmetric", "dynamic", "actorder"} | shape
    check_fields(METHOD, where, weights, known | HARMLESS_OF_WEIGHTS)
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    served: tuple[object, ...]
    for field, value, served in (
        ("type", kind, ("int", "float")),
        ("num_bits", bits, (8,) if kind == "float" else (4, 8)),
        ("symmetric", weights.get("symmetric", True), (True, False)),
        ("dynamic", weights.get("dynamic", False), (False,)),
        ("actorder", weights.get("actorder"), ORDERS if kind == "float" else (*ORDERS, *ORDERED)),
    ):
        check_value(METHOD, f"{where}.{field}", value, served)
    size, block = weights.get("group_size"), weights.get("block_structure")
    is_group = is_size(size)
    strategy = weights.get("strategy") or ("group" if is_group else "channel" if size else "tensor")
    check_value(METHOD, f"{where}.strategy", strategy, STRATEGIES_OF[kind])
    if strategy == "group" and not is_group:
        raise refused_field(METHOD, f"{where}.group_size", size)
    if strategy == "block" and not _are_sizes(block):
        raise refused_field(METHOD, f"{where}.block_structure", block)
    return Scheme(
        is_float=kind == "float",
        bits=bits,
        is_symmetric=weights.get("symmetric", True),
        strategy=strategy,
        group_size=int(size or 1),
        block=(block[0], block[1]) if strategy == "block" and block else (1, 1),
        is_ordered=strategy == "group" and weights.get("actorder") in ORDERED,
    )


def _are_sizes(block: Any) -> bool:
    is_pair = isinstance(block, list) and len(block) == 2
    return is_pair and all(map(is_size, block))


def _matrix(scales: torch.Tensor) -> torch.Tensor:
    """Scales as [outputs, groups]; those of channels or of a tensor may have fewer dimensions."""
    if scales.dim() > 2:
        raise Unfit(f"its scales have the shape {list(scales.shape)}")
    return scales if scales.dim() == 2 else scales.reshape(-1, 1)


def _rows(scales: torch.Tensor, outputs: int) -> torch.Tensor:
    return scales.expand(outputs, scales.shape[1])


def _groups(parts: Mapping[str, torch.Tensor], scheme: Scheme) -> torch.Tensor | None:
    """The group of each input, of a weight whose groups are not consecutive."""
    groups = parts.get("weight_g_idx")
    if groups is None or bool((groups == -1).all()):
        if scheme.is_ordered:
            raise Unfit("it has no weight_g_idx, and config.json says that inputs are ordered")
        return None
    if groups.dim() != 1 or groups.dtype not in {torch.int32, torch.int64}:
        raise Unfit(f"its weight_g_idx is {groups.dtype} {list(groups.shape)}")
    return groups


def _zeros(
    parts: Mapping[str, torch.Tensor], scheme: Scheme, scales: torch.Tensor, *, offset: int = 0
) -> torch.Tensor | int:
    """The zero points of a weight, plus `offset`: [outputs or 1, groups], or one for all."""
    zeros = parts.get("weight_zero_point")
    if zeros is None:
        if not scheme.is_symmetric:
            raise Unfit("it has no weight_zero_point, and config.json says that it is asymmetric")
        return offset
    if zeros.dtype == torch.int8 and tuple(_matrix(zeros).shape) == tuple(scales.shape):
        return _matrix(zeros).to(torch.int16) + offset
    expected = (-(-len(scales) * scheme.bits // 32), scales.shape[1])
    if zeros.dtype != torch.int32 or tuple(zeros.shape) != expected or offset == 0:
        raise Unfit(f"its weight_zero_point is {zeros.dtype} {list(zeros.shape)}")
    return unpacked(zeros.T, scheme.bits).T[: len(scales)]
