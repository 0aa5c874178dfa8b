"""Reads the weights of a folder into the model of transformers, dequantized if they are quantized.

Knows no architecture. What is not served is refused before transformers reads a weight.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from engine.errors import ModelRefused
from engine.model.device.one_thread import one_thread
from engine.model.kernels.quantized import StoredWeight
from engine.model.wide.block_fp8 import BlockFP8, block_fp8, cast_plain_weights
from engine.model.wide.compressed_tensors import METHOD as COMPRESSED_TENSORS
from engine.model.wide.compressed_tensors import compressed_tensors
from engine.model.wide.config_limits import refuse_more_numbers
from engine.model.wide.gguf_loader import first_line
from engine.model.wide.gptq_and_awq import AWQ, GPTQ, awq, gptq
from engine.model.wide.load_report import refuse_unfitting
from engine.model.wide.quantization import refuse_quantized_files
from engine.model.wide.quantized_weights import WeightFormat, read_quantized, sorted_tensors
from engine.model.wide.stored_tensors import by_name, finder, stored_tensors
from engine.model.wide.text_only import is_wrapper, text_only_class
from engine.model.wide.transformers_model import ATTENTION_NAME

#: The field of config.json that describes quantized weights.
NOTE = "quantization_config"
#: The methods whose weights are read here, with what reads their notes.
FORMS: Mapping[str, Callable[[Mapping[str, Any]], WeightFormat]] = {
    COMPRESSED_TENSORS: compressed_tensors,
    GPTQ: gptq,
    AWQ: awq,
}
#: What transformers says when it cannot stack or split tensors, for instance those of experts.
CONVERSION_FAILED = "automatic conversion of the weights"
#: No form of the fast path computes in float16 on a CPU, so weights are dequantized into float32.
DTYPES_OF_CPU = {torch.float16: torch.float32}


def quantized_form(config: Mapping[str, Any]) -> BlockFP8 | WeightFormat | None:
    """How config.json says that weights are quantized; None if it does not, or not as is known.

    Raises:
        ModelRefused: the method is served, but not with these fields.
    """
    note = config.get(NOTE)
    if isinstance(note, dict):
        for method, form in FORMS.items():
            if note.get("quant_method") == method:
                return form(note)
    return block_fp8(config)


def read_folder(
    path: str | Path,
    folder: Path,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    pictures: bool = False,
) -> tuple[PreTrainedModel, Mapping[str, StoredWeight]]:
    """The model of a folder on the CPU, and the weights that its layers keep quantized.

    Args:
        path: the folder, or the name of the model on the hub.
        folder: the local folder.
        config: of the model.
        dtype: the type of the weights; None for that of the checkpoint.
        device: where the model will compute.
        pictures: whether a multimodal model keeps its encoder of pictures.

    Raises:
        ModelRefused: the weights do not fit the model, are damaged or have no known meaning.
    """
    find = finder(path, folder)
    named = getattr(config, "transformers_weights", None)
    tensors = by_name(stored_tensors(find, named))
    form = quantized_form(vars(config))
    stored: Mapping[str, StoredWeight] = MappingProxyType({})
    options = _class_options(config, pictures=pictures) | {"dtype": dtype or "auto"}
    refuse_more_numbers(_concrete(options, config), config, tensors.values(), path)
    if form is None or isinstance(form, BlockFP8):
        plain = tensors.values() if form is None else form.other_tensors(tensors.values())
        refuse_quantized_files(find, plain)
        if form is not None:
            options["quantization_config"] = form.loading_config()
        model, report = _loaded(path, str(path), options)
        if form is not None:
            cast_plain_weights(model)
    else:
        quantized = sorted_tensors(tensors.values(), form)
        refuse_quantized_files(find, quantized.plain, known=form.note_files)
        options["dtype"] = dtype or _dtype_of(config, device)
        with one_thread():
            read = read_quantized(quantized, find, options["dtype"])
        # The other one reads a folder; without one, the class must be named.
        options["model_class"] = _concrete(options, config)
        options |= {
            "config": _without_note(config),
            "generation_config": _generation_config(folder),
        }
        (model, report), stored = read.load(
            lambda state: _loaded(path, None, options | {"state_dict": state}),
            # No form that multiplies integers computes in float16 or on a GPU.
            keeps=torch.device(device).type == "cpu" and options["dtype"] != torch.float16,
        )
        report = read.without_zero_biases(report)
    refuse_unfitting(model, report, path, tensors)
    return model, stored


def _class_options(config: PreTrainedConfig, *, pictures: bool) -> dict[str, Any]:
    """The class of the model and what attends in it, as options of `_loaded`."""
    model_class: Any = AutoModelForCausalLM
    attention: Any = ATTENTION_NAME
    if pictures:
        model_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        attention = {"": ATTENTION_NAME, "text_config": ATTENTION_NAME, "vision_config": "sdpa"}
    elif is_wrapper(config):
        model_class = text_only_class(config)
    return {"model_class": model_class, "attn_implementation": attention}


def _concrete(options: Mapping[str, Any], config: PreTrainedConfig) -> Any:
    """The class of the model itself, which `AutoModelForCausalLM` would find."""
    chosen = options["model_class"]
    is_auto = chosen is AutoModelForCausalLM
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if is_auto else chosen


def _loaded(
    path: str | Path, source: str | None, options: Mapping[str, Any]
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """A model by `from_pretrained`, and its loading report.

    Args:
        path: as the user named the model.
        source: where transformers reads weights; None if `options` have them.
        options: the class of the model, and further arguments of `from_pretrained`.
    """
    model_class: Any = options["model_class"]
    try:
        model, report = model_class.from_pretrained(
            source,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **{name: value for name, value in options.items() if name != "model_class"},
        )
    except Exception as error:
        if isinstance(error, KeyError) and ATTENTION_NAME in error.args:
            # A model that selects its layers from its own table does not know our attention.
            raise ModelRefused(
                f"{path} does not dispatch its attention through transformers' AttentionInterface"
            ) from error
        if CONVERSION_FAILED in str(error):
            raise ModelRefused(
                f"the weights of {path} do not fit together: transformers cannot build tensors of "
                "the model from them, and has logged which: use config.json and weights of the "
                "same checkpoint"
            ) from error
        raise ModelRefused(f"transformers cannot load {path}: {first_line(error)}") from error
    assert isinstance(model, PreTrainedModel)
    return model, report


def _dtype_of(config: PreTrainedConfig, device: torch.device | str) -> torch.dtype:
    """The type of config.json; float32 if it names none, or one that the CPU has no kernels for."""
    named = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    dtype: torch.dtype = named if isinstance(named, torch.dtype) else torch.float32
    return DTYPES_OF_CPU.get(dtype, dtype) if torch.device(device).type == "cpu" else dtype


def _without_note(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model with plain weights."""
    plain = copy.deepcopy(config)
    delattr(plain, NOTE)
    return plain


def _generation_config(folder: Path) -> GenerationConfig | None:
    if not (folder / "generation_config.json").is_file():
        return None
    return GenerationConfig.from_pretrained(str(folder))
