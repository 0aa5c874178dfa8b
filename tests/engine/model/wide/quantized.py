"""Builders of checkpoints that are quantized by hand, in the layout of each kind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
#: Replaces one weight [outputs, inputs], by its name without ".weight".
Quantizer = Callable[[str, torch.Tensor], Tensors]

FP8 = torch.float8_e4m3fn


def save_quantized(source: Path, folder: Path, quantizer: Quantizer) -> Path:
    """Copy a model and quantize the projections of its layers; config.json does not mention it."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    weights: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj.weight" in name:
            weights |= quantizer(name.removesuffix(".weight"), tensor)
        else:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def note(folder: Path, **fields: object) -> Path:
    """Add fields to config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def save_mxfp4(source: Path, folder: Path) -> Path:
    """Copy a GPT-OSS with the experts of a random MXFP4 checkpoint, and its note.

    Blocks are [experts, outputs, groups, 16], two values of four bits in each byte; scales are
    exponents of two with a bias of 127, one for each group of 32 inputs.
    """
    shutil.copytree(source, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        groups = (experts, outputs, inputs // 32)
        for part, shape, low, high in (
            ("blocks", (*groups, 16), 0, 256),
            ("scales", groups, 119, 126),
        ):
            values = torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
            weights[f"{name}_{part}"] = values
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return note(folder, quantization_config={"quant_method": "mxfp4"}, dtype="bfloat16")


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def _packed(weight: torch.Tensor, dtype: torch.dtype, per_word: int) -> torch.Tensor:
    """Noise in the shape of packed weights."""
    return torch.randint(0, 100, (len(weight), weight.shape[1] // per_word)).to(dtype)


def _plain_int8(name: str, weight: torch.Tensor) -> Tensors:
    return {f"{name}.weight": _int8(weight)[0]}


def _nobody_s_int8(name: str, weight: torch.Tensor) -> Tensors:
    values, scale = _int8(weight)
    return {f"{name}.weight": values, f"{name}.stretch": scale}


def _plain_fp8(name: str, weight: torch.Tensor) -> Tensors:
    return {f"{name}.weight": weight.to(FP8)}


def _modelopt_fp8(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().max() / 448
    return {
        f"{name}.weight": (weight / scale).to(FP8),
        f"{name}.weight_scale": scale,
        f"{name}.input_scale": torch.ones(()),
    }


def _fp8_blocks(name: str, weight: torch.Tensor) -> Tensors:
    return {f"{name}.weight": weight.to(FP8), f"{name}.weight_scale_inv": torch.ones(1, 1)}


def _nvfp4(name: str, weight: torch.Tensor) -> Tensors:
    return {
        f"{name}.weight": _packed(weight, torch.uint8, 2),
        f"{name}.weight_scale": torch.ones(len(weight), weight.shape[1] // 16).to(FP8),
        f"{name}.weight_scale_2": torch.ones(()),
    }


def _gptq(name: str, weight: torch.Tensor) -> Tensors:
    return {
        f"{name}.qweight": _packed(weight, torch.int32, 8),
        f"{name}.qzeros": torch.ones(1, len(weight) // 8, dtype=torch.int32),
        f"{name}.scales": torch.ones(1, len(weight), dtype=torch.float16),
        f"{name}.g_idx": torch.zeros(weight.shape[1], dtype=torch.int32),
    }


def _awq(name: str, weight: torch.Tensor) -> Tensors:
    tensors = _gptq(name, weight)
    del tensors[f"{name}.g_idx"]
    return tensors


def _bitsandbytes_nf4(name: str, weight: torch.Tensor) -> Tensors:
    return {
        f"{name}.weight": torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8),
        f"{name}.weight.absmax": torch.ones(weight.numel() // 64),
        f"{name}.weight.quant_map": torch.linspace(-1, 1, 16),
        f"{name}.weight.quant_state.bitsandbytes__nf4": torch.zeros(64, dtype=torch.uint8),
    }


def _bitsandbytes_int8(name: str, weight: torch.Tensor) -> Tensors:
    values, scale = _int8(weight)
    return {f"{name}.weight": values, f"{name}.SCB": scale[:, 0] * 127}


def _compressed_tensors(name: str, weight: torch.Tensor) -> Tensors:
    return {
        f"{name}.weight_packed": _packed(weight, torch.int32, 8),
        f"{name}.weight_scale": torch.ones(len(weight), 1),
        f"{name}.weight_shape": torch.tensor(weight.shape),
    }


def _mlx(name: str, weight: torch.Tensor) -> Tensors:
    return {
        f"{name}.weight": _packed(weight, torch.uint32, 8),
        f"{name}.scales": torch.ones(len(weight), 1),
        f"{name}.biases": torch.zeros(len(weight), 1),
    }


def _hqq(name: str, weight: torch.Tensor) -> Tensors:
    return {
        f"{name}.W_q": _packed(weight, torch.uint8, 2),
        f"{name}.scale": torch.ones(len(weight), 1),
        f"{name}.zero": torch.zeros(len(weight), 1),
    }


def _torchao(name: str, weight: torch.Tensor) -> Tensors:
    values, scale = _int8(weight)
    return {f"{name}._weight_qdata": values, f"{name}._weight_scale": scale}


def _quark(name: str, weight: torch.Tensor) -> Tensors:
    values, scale = _int8(weight)
    zeros = torch.zeros(len(weight), dtype=torch.int8)
    return {
        f"{name}.weight": values,
        f"{name}.weight_scale": scale[:, 0],
        f"{name}.weight_zero_point": zeros,
    }


def _rounded_floats(name: str, weight: torch.Tensor) -> Tensors:
    """The weights are floats of the right shape, but divided by their scales."""
    values, scale = _int8(weight)
    return {f"{name}.weight": values.float(), f"{name}.weight_scale": scale}


def _rounded_floats_of_nobody(name: str, weight: torch.Tensor) -> Tensors:
    values, scale = _int8(weight)
    return {f"{name}.weight": values.float(), f"{name}.stretch": scale}


#: Each kind with the tensor that its refusal names, and what it says of it.
KINDS: dict[str, tuple[Quantizer, str]] = {
    "int8 without scales": (_plain_int8, r"stores \S+_proj\.weight as I8"),
    "int8 under an unknown name": (_nobody_s_int8, r"stores \S+_proj\.weight as I8"),
    "fp8 without scales": (_plain_fp8, r"stores \S+_proj\.weight as F8_E4M3"),
    "ModelOpt FP8": (_modelopt_fp8, r"has \S+_proj\.(weight|input)_scale, which belongs to"),
    "FP8 in blocks": (_fp8_blocks, r"has \S+_proj\.weight_scale_inv, which belongs to"),
    "NVFP4": (_nvfp4, r"has \S+_proj\.weight_scale(_2)?, which belongs to"),
    "GPTQ": (_gptq, r"has \S+_proj\.(g_idx|qweight|qzeros|scales), which belongs to"),
    "AWQ": (_awq, r"has \S+_proj\.(qweight|qzeros|scales), which belongs to"),
    "bitsandbytes NF4": (_bitsandbytes_nf4, r"has \S+_proj\.weight\.\w+, which belongs to"),
    "bitsandbytes int8": (_bitsandbytes_int8, r"has \S+_proj\.SCB, which belongs to"),
    "compressed-tensors": (_compressed_tensors, r"has \S+_proj\.weight_\w+, which belongs to"),
    "MLX": (_mlx, r"(stores \S+_proj\.weight as U32|has \S+_proj\.scales, which belongs to)"),
    "HQQ": (_hqq, r"has \S+_proj\.W_q, which belongs to"),
    "torchao": (
        _torchao,
        r"(stores \S+_weight_qdata as|has \S+_weight_scale, which belongs)",
    ),
    "Quark": (_quark, r"has \S+_proj\.weight_(scale|zero_point), which belongs to"),
    "floats with their scales": (_rounded_floats, r"has \S+_proj\.weight_scale, which belongs to"),
}
UNKNOWN_SCALES = _rounded_floats_of_nobody
