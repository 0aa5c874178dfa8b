"""Writes checkpoints with packed weights, and the values of each weight by its definition.

Numbers and values are computed one word and one group at a time, which is not how the engine reads
them.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.model.wide.loader import LoadedModel
from engine.model.wide.stored_layers import dequantize
from tests.engine.model.builders import save_model
from tests.engine.model.wide.quantized import FP8, Tensors, note

#: Makes the tensors of a weight [outputs, inputs], by the last parts of their names, and its
#: values in float32.
Packer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def save_packed(config, folder: Path, packer: Packer, described: Mapping, **fields) -> Path:
    """A model with packed projections in `folder`, and the same one with plain weights beside it.

    Args:
        packer: packs the projections.
        described: the note in config.json.
        fields: further ones of config.json.
    """
    wrappers = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    save_model(config, folder, model_class=wrappers.get(type(config), None))
    plain = plain_of(folder)
    shutil.copytree(folder, plain)
    weights = load_file(folder / "model.safetensors")
    values = dict(weights)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        parts, values[name] = packer(weights.pop(name).float())
        owner = name.removesuffix(".weight")
        weights |= {f"{owner}.{part}": one.contiguous() for part, one in parts.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    note(plain, **fields)
    return note(folder, quantization_config=dict(described), **fields)


def plain_of(folder: Path) -> Path:
    """Where the model with plain weights is."""
    return folder.with_name(f"{folder.name}-plain")


def weights_of(loaded: LoadedModel) -> Tensors:
    """All weights, dequantized; the model has ordinary layers then."""
    dequantize(loaded.model)
    return loaded.model.state_dict()


def change(folder: Path, described: Mapping | None = None, **tensors) -> Path:
    """Replace fields of the note, and tensors; None removes one; `__` in a name is a dot."""
    config = json.loads((folder / "config.json").read_text())
    note(folder, quantization_config=config["quantization_config"] | dict(described or {}))
    weights = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def words_of(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, numbers] as [rows, words], int32: the first number is in the lowest bits of a word."""
    per_word = 32 // bits
    words = torch.zeros(len(numbers), -(-numbers.shape[1] // per_word), dtype=torch.int64)
    for column in range(numbers.shape[1]):
        place = bits * (column % per_word)
        words[:, column // per_word] |= numbers[:, column].long() << place
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def rounded(
    weight: torch.Tensor,
    bits: int,
    group_of: torch.Tensor,
    *,
    is_symmetric: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [outputs, inputs], zero points and scales [outputs, groups], and their values.

    Args:
        group_of: [inputs], the group of each.
        dtype: of the scales.
    """
    num_groups, top = int(group_of.max()) + 1, (1 << bits) - 1
    numbers, values = torch.zeros_like(weight, dtype=torch.int64), torch.zeros_like(weight)
    zeros = torch.full((len(weight), num_groups), 1 << (bits - 1))
    scales = torch.zeros(len(weight), num_groups, dtype=dtype)
    for group in range(num_groups):
        own = group_of == group
        part = weight[:, own]
        if is_symmetric:
            scales[:, group] = (part.abs().amax(1) / (top // 2)).to(dtype)
        else:
            scales[:, group] = ((part.amax(1) - part.amin(1)) / (top - 1)).to(dtype)
            lowest = -part.amin(1) / scales[:, group].float()
            zeros[:, group] = lowest.round().long().clamp(1, top)
        scale, zero = scales[:, group, None].float(), zeros[:, group, None]
        numbers[:, own] = ((part / scale).round().long() + zero).clamp(0, top)
        values[:, own] = (numbers[:, own] - zero) * scale
    return numbers, zeros, scales, values


def consecutive_groups(inputs: int, size: int) -> torch.Tensor:
    """The group of each input; one for all if the size is -1."""
    return torch.arange(inputs) // (inputs if size == -1 else size)


def fp8_values(
    weight: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Floats of 8 bits, the scale of each block, and their values; -1 is the whole dimension."""
    rows, columns = (size if size > 0 else weight.shape[dim] for dim, size in enumerate(block))
    counts = [-(-size // part) for size, part in zip(weight.shape, (rows, columns), strict=True)]
    stored, values = torch.zeros_like(weight, dtype=FP8), torch.zeros_like(weight)
    scales = torch.zeros(*counts, dtype=dtype)
    for row in range(counts[0]):
        for column in range(counts[1]):
            own = (
                slice(row * rows, (row + 1) * rows),
                slice(column * columns, (column + 1) * columns),
            )
            scales[row, column] = (weight[own].abs().max() / 448).to(dtype)
            scale = scales[row, column].float()
            stored[own] = (weight[own] / scale).to(FP8)
            values[own] = stored[own].float() * scale
    return stored, scales, values


def packed(bits=4, size=32, *, is_symmetric=True, dtype=torch.bfloat16, order=None):
    """A packer; `order` gives the group of each of so many inputs."""

    def packer(weight):
        outputs, inputs = weight.shape
        group_of = order(inputs) if order else consecutive_groups(inputs, size)
        numbers, zeros, scales, values = rounded(
            weight, bits, group_of, is_symmetric=is_symmetric, dtype=dtype
        )
        parts = {
            "weight_packed": words_of(numbers, bits),
            "weight_shape": torch.tensor([outputs, inputs]),
            "weight_scale": scales,
        }
        if not is_symmetric:
            parts["weight_zero_point"] = words_of(zeros.T, bits).T
        if order:
            parts["weight_g_idx"] = group_of.int()
        return parts, values

    return packer


def integers(*, is_symmetric=True, shape=None, dtype=torch.bfloat16):
    """A packer of int8 with a scale for each output; `shape` is that of the scales."""

    def packer(weight):
        group_of = consecutive_groups(weight.shape[1], -1)
        numbers, zeros, scales, values = rounded(
            weight, 8, group_of, is_symmetric=is_symmetric, dtype=dtype
        )
        parts = {"weight": (numbers - 128).to(torch.int8), "weight_scale": scales}
        if not is_symmetric:
            parts["weight_zero_point"] = (zeros - 128).to(torch.int8)
        if shape is not None:
            parts["weight_scale"] = scales.reshape(shape)
        return parts, values

    return packer


def floats(block=(1, -1), *, dtype=torch.bfloat16, is_flat=False):
    """A packer of floats with a scale for each block; -1 is the whole dimension."""

    def packer(weight):
        stored, scales, values = fp8_values(weight, block, dtype)
        return {"weight": stored, "weight_scale": scales.flatten() if is_flat else scales}, values

    return packer


def shuffled(inputs):
    """Whole groups of 32 inputs that are not neighbours."""
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    return consecutive_groups(inputs, 32)[order]


def spread(size):
    """A weight whose rows differ in scale, so that a scale of a wrong row shows."""
    torch.manual_seed(0)
    return torch.randn(size) * torch.logspace(-2, 0, size[0])[:, None]


def gptq_packed(bits=4, size=32, *, is_symmetric=True, order=None, offset=1, dtype=torch.float16):
    """A packer of GPTQ; `offset` is what zero points lack, which is 0 in its second version."""

    def packer(weight):
        group_of = order(weight.shape[1]) if order else consecutive_groups(weight.shape[1], size)
        numbers, zeros, scales, values = rounded(
            weight, bits, group_of, is_symmetric=is_symmetric, dtype=dtype
        )
        parts = {
            "qweight": words_of(numbers, bits).T,
            "qzeros": words_of(zeros.T - offset, bits),
            "scales": scales.T,
            "g_idx": group_of.int(),
        }
        return parts, values

    return packer


def awq_packed(size=32, *, is_symmetric=False):
    """A packer of AWQ, whose words have eight outputs in the order of its kernels."""

    def words(numbers):
        ordered = numbers.view(len(numbers), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return words_of(ordered.flatten(1), 4)

    def packer(weight):
        numbers, zeros, scales, values = rounded(
            weight,
            4,
            consecutive_groups(weight.shape[1], size),
            is_symmetric=is_symmetric,
            dtype=torch.float16,
        )
        parts = {
            "qweight": words(numbers.T.contiguous()),
            "qzeros": words(zeros.T.contiguous()),
            "scales": scales.T,
        }
        return parts, values

    return packer
