"""Reads LoRA adapters in PEFT's folder format, or refuses them with a reason.

Hu et al., LoRA, 2021: a linear layer computes y = W x + scale * up (down x). Every field of an
adapter's config must be known here, as those of a model's config: an adapter with a field that
would change the result and is not computed here is refused. No field is ignored silently.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from engine.errors import ModelRefused

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
#: The weights as a pickle, which is refused.
PICKLE_NAME = "adapter_model.bin"
#: Prefix of every module's name in a file of weights.
PREFIX = "base_model.model."
#: The largest rank that a layer of an adapter may have.
MAX_RANK = 1024

#: Fields that this module uses or checks one by one.
_READ = frozenset(
    {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"}
)
#: Fields that name the adapted layers, as the weights also do, or describe the training.
_HARMLESS = frozenset(
    {
        "base_model_name_or_path",
        "revision",
        "peft_version",
        "auto_mapping",
        "inference_mode",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "lora_dropout",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        # For embeddings and heads; an adapter with tensors for them is refused.
        "ensure_weight_tying",
        "qalora_group_size",
        "runtime_config",
    }
)
#: Fields with the only supported values; every other field must be empty.
_EXPECTED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
}
#: Values of `init_lora_weights` that do not change the model's own weights, like True, False and
#: null.
_HARMLESS_INITS = frozenset({"gaussian", "orthogonal", "eva", "mica"})
#: A tensor's name: the module's name, then A or B.
_TENSOR = re.compile(rf"{re.escape(PREFIX)}(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
#: A module inside a decoder layer: its name contains the layer's number.
_IN_A_LAYER = re.compile(r".+\.\d+\..+")


@dataclass(frozen=True, slots=True)
class LowRank:
    """A low-rank update of one linear layer.

    Args:
        down: [rank, inputs], PEFT's A.
        up: [outputs, rank], PEFT's B.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)

    def added(self, inputs: torch.Tensor) -> torch.Tensor:
        """The update [tokens, outputs] for [tokens, inputs]."""
        return functional.linear(functional.linear(inputs, self.down) * self.scale, self.up)


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter, its tensors in the type and on the device of the model.

    Args:
        fingerprint: a hash of the config and the weights.
        layers: the updates by the name of the linear layer in the model.
    """

    name: str
    fingerprint: str
    layers: Mapping[str, LowRank]

    @property
    def max_rank(self) -> int:
        """The largest rank of any layer."""
        return max(part.rank for part in self.layers.values())


def read_adapters(
    model: PreTrainedModel,
    folders: Mapping[str, Path],
    *,
    device: torch.device | str | None = None,
) -> tuple[Adapter, ...]:
    """Read the adapters of some folders for a model; the result is sorted by name.

    Their tensors are put on `device`, or on that of the model. A model on the device `meta` has
    shapes and no weights, which is enough to check adapters.

    Raises:
        ModelRefused: an adapter cannot be served; the message is one sentence.
    """
    return tuple(_Reader(folders[name], model, device).adapter(name) for name in sorted(folders))


class _Reader:
    """Reads the adapter in one folder."""

    def __init__(
        self, folder: Path, model: PreTrainedModel, device: torch.device | str | None
    ) -> None:
        self._folder = folder
        self._device = device
        self._linears = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and _IN_A_LAYER.fullmatch(name)
        }

    def adapter(self, name: str) -> Adapter:
        config_bytes = self._bytes_of(CONFIG_NAME)
        config = self._config(config_bytes)
        if (self._folder / PICKLE_NAME).exists() and not (self._folder / WEIGHTS_NAME).exists():
            raise self._refused(
                f"its weights are pickled ({PICKLE_NAME}), and a pickle can run any code: convert "
                "them to safetensors"
            )
        weights = self._bytes_of(WEIGHTS_NAME)
        layers = self._layers(config, self._sides(weights))
        digest = hashlib.sha256(hashlib.sha256(config_bytes).digest())
        digest.update(hashlib.sha256(weights).digest())
        return Adapter(name, digest.hexdigest()[:32], layers)

    def _refused(self, reason: str) -> ModelRefused:
        return ModelRefused(f"the adapter in {self._folder} cannot be served: {reason}")

    def _bytes_of(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except OSError as error:
            raise self._refused(f"{name} cannot be read: {error.strerror}") from error

    def _config(self, text: bytes) -> dict[str, Any]:
        try:
            config = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._refused(f"{CONFIG_NAME} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise self._refused(f"{CONFIG_NAME} is not a JSON object")
        for name, values in _EXPECTED.items():
            if config.get(name) not in values:
                raise self._refused(f"{CONFIG_NAME} has {name} = {config.get(name)!r}")
        init = config.get("init_lora_weights")
        is_harmless = str(init).lower() in _HARMLESS_INITS
        if not is_harmless and init not in (True, False, None):
            raise self._refused(
                f"{CONFIG_NAME} has init_lora_weights = {init!r}, which may change the model's own "
                "weights: let PEFT save it as a plain LoRA "
                "(path_initial_model_for_weight_conversion)"
            )
        for name in sorted(config.keys() - _READ - _HARMLESS - _EXPECTED.keys()):
            if config[name]:
                raise self._refused(
                    f"{CONFIG_NAME} has {name} = {config[name]!r}, which this engine does not "
                    "compute"
                )
        return config

    def _sides(self, weights: bytes) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors A and B by the name of their module."""
        try:
            tensors = load(weights)
        except (SafetensorError, ValueError, KeyError) as error:
            raise self._refused(f"{WEIGHTS_NAME} is not in safetensors format: {error}") from error
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            parts = _TENSOR.fullmatch(name)
            if parts is None:
                raise self._refused(f"its tensor {name} is not the A or B of a linear layer")
            module = parts["module"]
            if module not in self._linears:
                raise self._refused(f"{module} is not a linear layer in the model's layers")
            found.setdefault(module, {})[parts["side"]] = tensor
        if not found:
            raise self._refused(f"{WEIGHTS_NAME} has no tensors")
        return found

    def _layers(
        self, config: dict[str, Any], sides: dict[str, dict[str, torch.Tensor]]
    ) -> dict[str, LowRank]:
        layers = {}
        for name, tensors in sorted(sides.items()):
            if len(tensors) < 2:
                raise self._refused(f"{name} has only one of lora_A and lora_B")
            rank = int(given := self._number(config, "r", "rank_pattern", name))
            if rank != given or not 1 <= rank <= MAX_RANK:
                raise self._refused(f"r = {given!r} for {name} is not in 1 .. {MAX_RANK}")
            linear = self._linears[name]
            shapes = {"A": (rank, linear.in_features), "B": (linear.out_features, rank)}
            for side, shape in shapes.items():
                if tensors[side].is_complex():
                    raise self._refused(f"lora_{side} of {name} has complex numbers")
                if tuple(tensors[side].shape) != shape:
                    raise self._refused(
                        f"lora_{side} of {name} is {tuple(tensors[side].shape)}; r and the model "
                        f"need {shape}"
                    )
            alpha = self._number(config, "lora_alpha", "alpha_pattern", name)
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            like, device = linear.weight, self._device or linear.weight.device
            down, up = (tensors[side].to(device, like.dtype) for side in "AB")
            if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
                raise self._refused(
                    f"{name} has numbers that are not finite in {linear.weight.dtype}"
                )
            layers[name] = LowRank(down, up, scale)
        return layers

    def _number(self, config: dict[str, Any], name: str, pattern_name: str, module: str) -> float:
        """A field's value for a module: the value of the first pattern that its name ends with."""
        where, value = name, config.get(name)
        patterns = config.get(pattern_name) or {}
        if not isinstance(patterns, dict):
            raise self._refused(f"{CONFIG_NAME} has {pattern_name} = {patterns!r}")
        for pattern, other in patterns.items():
            try:
                fits = re.fullmatch(rf"(.*\.)?({pattern})", module)
            except re.error as error:
                raise self._refused(f"{pattern_name} has {pattern!r}: {error}") from error
            if fits:
                where, value = f"{pattern_name}[{pattern!r}]", other
                break
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not abs(value) <= sys.float_info.max
        ):
            raise self._refused(f"{CONFIG_NAME} has {where} = {value!r}")
        return float(value)
