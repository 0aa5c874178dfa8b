"""Builders of the adapters' tests: random ones in PEFT's format, and models with them merged in."""

import functools
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from engine.model.adapters import read_adapters
from engine.model.decoder.decoder import Decoder
from engine.model.decoder.decoder_adapters import map_adapter
from engine.model.decoder.decoder_weights import read_weights
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.decoder.read_config import read_config
from engine.model.kernels.build import Variant, best_variant
from tests.engine.model.builders import Oracle
from tests.engine.model.decoders import Forms, forms_of

#: The targets of most adapters, whatever the family.
ALL_LINEAR = "all-linear"
#: Of all layers and of few, of ranks that fill words and strips and of ranks that do not.
ADAPTERS = {
    "a": {"r": 8},
    "odd": {"r": 5, "lora_alpha": 10, "rank_pattern": {"k_proj": 1, "up_proj": 19, "o_proj": 2}},
    "few": {
        "r": 33,
        "lora_alpha": 70,
        "targets": ["q_proj", "v_proj", "down_proj", "o_proj", "in_proj", "out_proj", "w2"],
    },
}
#: So large that an output with an adapter is another one soon.
ALPHA = 24


def save_adapter(
    model_folder: Path,
    folder: Path,
    *,
    r: int = 8,
    targets: Sequence[str] | str = ALL_LINEAR,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """A folder as PEFT would write it, with random weights for a model's linear layers.

    `rank_pattern` in the fields is taken by the end of a module's name.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, inputs, outputs in _linear_layers((model_folder / "config.json").read_text()):
        if targets != ALL_LINEAR and name.rpartition(".")[2] not in targets:
            continue
        ends = fields.get("rank_pattern", {}).items()
        rank = next((rank for end, rank in ends if re.search(rf"\.{end}$", name)), r)
        shapes = {"A": (rank, inputs), "B": (outputs, rank)}
        for side, shape in shapes.items():
            values = torch.randn(shape, generator=generator) * shape[1] ** -0.5 * 0.5
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = values.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": r, "lora_alpha": ALPHA}
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@functools.cache
def _linear_layers(config: str) -> list[tuple[str, int, int]]:
    """Name, inputs and outputs of every linear layer but the head, by the text of the config.

    The model has no weights: a load per adapter was half the time of the tests of adapters.
    """
    # transformers writes the number infinity as an object.
    values = json.loads(config, object_hook=lambda one: float(one.get("__float__", 0)) or one)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    return [
        (name, module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    ]


def merged(model_folder: Path, adapter: Path, scales: Mapping[str, float] | float) -> Oracle:
    """transformers' model whose weights have the adapter in them, W + scale * B A in float32."""
    oracle = Oracle(model_folder)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, module in oracle._model.named_modules():
        key = f"base_model.model.{name}.lora_"
        if f"{key}A.weight" in tensors:
            scale = scales if isinstance(scales, float) else scales[name.rpartition(".")[2]]
            change = tensors[f"{key}B.weight"].float() @ tensors[f"{key}A.weight"].float()
            module.weight.data += scale * change
    return oracle


def adapted_forms(
    config: PreTrainedConfig,
    folder: Path,
    adapters: Mapping[str, Mapping[str, Any]],
    *,
    dtype: str,
    variant: Variant | None = None,
) -> Forms:
    """All forms of a random model with random adapters, each described as to `save_adapter`."""
    plain = forms_of(config, folder / "model", dtype=dtype)
    kind = getattr(torch, dtype)
    folders = {
        name: save_adapter(folder / "model", folder / name, seed=seed, dtype=kind, **options)
        for seed, (name, options) in enumerate(adapters.items())
    }
    read = read_adapters(plain.wide.model, folders)
    plain.wide.add_adapters(read)
    description = read_config(plain.wide)
    weights = read_weights(description, plain.wide.model.state_dict())
    placed = [map_adapter(description, adapter) for adapter in read]
    native = NativeDecoder(description, weights, placed, variant=variant or best_variant())
    return Forms(plain.wide, Decoder(description, weights, placed), native)


_shared: dict[tuple[str, str, str], Forms] = {}


def shared_adapted_forms(
    config: PreTrainedConfig, adapters: Mapping[str, Mapping[str, Any]], *, dtype: str
) -> Forms:
    """As `adapted_forms`, but built once in a process: no test may change them."""
    key = config.to_json_string(use_diff=False), json.dumps(adapters), dtype
    if key not in _shared:
        with tempfile.TemporaryDirectory() as folder:
            _shared[key] = adapted_forms(config, Path(folder), adapters, dtype=dtype)
    return _shared[key]
