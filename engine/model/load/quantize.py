"""Quantizes the weights of a loaded model, in the forms that the kernels multiply.

Each linear layer in groups of 32 inputs: `int8` as ggml's Q8_0, a scale; `int4` as its Q4_1, a
scale and a minimum (https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c). Embedding and
head decide most about the quality and have 8 bits in both. From then on the model *is* the
quantized one: its other path, and the check of its fast path, compute with the dequantized values.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from engine.errors import ModelRefused
from engine.model.device.one_thread import one_thread
from engine.model.kernels.quantized import GROUP, QuantizedWeight, concatenated
from engine.model.wide.loader import LoadedModel, load_model
from engine.model.wide.stored_layers import keep_stored

Quantization = Literal["int8", "int4"]

#: Elements that are quantized at once: intermediate results stay in the cache.
SLICE_ELEMENTS = 1 << 20


def load_quantized(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    quantization: Quantization | None,
    **options: Any,
) -> LoadedModel:
    """Load a model as `load_model` does; quantize linear layers and embedding, if that is wanted.

    Raises:
        ModelRefused: as `load_model`; or the model is quantized already, would not be on a CPU, or
            has values or sizes that cannot be quantized.
    """
    if quantization is None:
        return load_model(path, dtype=dtype, device=device, **options)
    if torch.device(device).type != "cpu":
        raise ModelRefused(f"quantization {quantization} is computed on a CPU only: leave it unset")
    loaded = load_model(path, dtype=dtype, device=device, **options)
    if loaded.stored:
        raise ModelRefused(f"{path} is quantized already: leave quantization unset")
    model: Any = loaded.model
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    stored: dict[str, QuantizedWeight] = {}
    found: dict[int, QuantizedWeight] = {}
    for name, layer in model.named_modules():
        if layer in ends or type(layer) is nn.Linear:
            weight: torch.Tensor = layer.weight
            if id(weight) not in found:
                kind = "int8" if layer in ends else quantization
                found[id(weight)] = _checked(weight, kind, f"{name}.weight of {path}")
            # Here, so that its own memory is free before the next one is quantized.
            keep_stored(model, {f"{name}.weight": found[id(weight)]})
            stored[f"{name}.weight"] = found[id(weight)]
    fingerprint = hashlib.sha256(f"{loaded.fingerprint} {quantization}".encode()).hexdigest()[:32]
    return replace(loaded, stored=stored, fingerprint=fingerprint, quantization=quantization)


def _checked(weight: torch.Tensor, kind: Quantization, name: str) -> QuantizedWeight:
    if weight.shape[1] % GROUP:
        raise ModelRefused(
            f"{name} cannot be quantized: it has {weight.shape[1]} inputs, no multiple of {GROUP}"
        )
    found = quantized(weight.detach(), kind)
    minima = found.scales if found.minima is None else found.minima
    if not (found.scales.isfinite().all() and minima.isfinite().all()):
        raise ModelRefused(f"{name} cannot be quantized: it has values beyond those of float16")
    return found


@one_thread()
def quantized(weight: torch.Tensor, kind: Quantization) -> QuantizedWeight:
    """The nearest numbers for scales in float16; weight is [outputs, inputs]."""
    step = max(1, SLICE_ELEMENTS // weight.shape[1])
    form = _int8 if kind == "int8" else _int4
    return concatenated([form(part.float()) for part in torch.split(weight, step)])


def _int8(weight: torch.Tensor) -> QuantizedWeight:
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(dim=-1) / 127).half()
    numbers = (groups * _inverse(scales)).round().clamp(-128, 127) + 128
    return QuantizedWeight(numbers.to(torch.uint8).flatten(1), scales, None, 8)


def _int4(weight: torch.Tensor) -> QuantizedWeight:
    groups = weight.view(len(weight), -1, GROUP)
    least, largest = groups.aminmax(dim=-1)
    scales, minima = ((largest - least) / 15).half(), least.half()
    numbers = ((groups - minima.float()[..., None]) * _inverse(scales)).round().clamp(0, 15)
    return QuantizedWeight(numbers.to(torch.uint8).flatten(1), scales, minima, 4)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """[outputs, groups, 1]; zero for a group of zeros, or of values too small for a scale."""
    inverse = 1 / scales.float()
    return torch.where(scales == 0, 0.0, inverse)[..., None]
