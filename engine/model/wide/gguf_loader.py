"""Loads the model of a GGUF file, or refuses the file with a reason.

Metadata or tensors that are not read may mean another model. So every key of the architecture and
every tensor of the file must be known. Knows no attention backend and no tokenizer.
"""

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from engine.errors import ModelRefused
from engine.model.device.one_thread import one_thread
from engine.model.wide.gguf_blocks import StoredBlocks, stored_blocks
from engine.model.wide.gguf_checks import (
    check_metadata,
    check_sizes,
    check_tensors,
    head_dim_of,
)
from engine.model.wide.gguf_families import (
    EMBEDDING,
    FAMILIES,
    HEAD,
    MODEL_TENSORS,
    GgufArchitecture,
)
from engine.model.wide.gguf_header import GgufHeader, check_extents, read_parts
from engine.model.wide.gguf_rotary import rotary_parameters
from engine.model.wide.stored_layers import dequantize, keep_stored, stand_in
from engine.model.wide.transformers_model import ATTENTION_NAME

#: The library that knows the types of blocks, and how to install it.
LIBRARY = "gguf"
GGUF_EXTRA = "the extra `gguf`: pip install -c constraints.txt -e '.[gguf]'"

#: The metadata keys of the tokens that end an answer: of a text, of a turn, of a message.
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

#: ggml's numbers of the types that are not quantized, with their name in torch.
_PLAIN_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model of quantized weights, and the end tokens that the file names.

    Args:
        model: its layers keep `stored` weights.
        files: the file, or the parts of a split model.
        stored: as in `LoadedModel`.
    """

    model: PreTrainedModel
    files: tuple[Path, ...]
    eos_token_ids: frozenset[int]
    stored: Mapping[str, StoredBlocks]


def is_gguf_name(path: str | Path) -> bool:
    """Whether it is named like a GGUF file, whether or not there is one."""
    return Path(path).suffix.lower() == ".gguf"


@one_thread()
def load_gguf(file: Path, *, dtype: torch.dtype | None, device: torch.device) -> GgufModel:
    """The model of a GGUF file, on the CPU. Its layers dequantize weights when they use them.

    Args:
        file: an existing file; of a split model, its first part.
        dtype: the type of the dequantized weights; None for that of the file, which is float32 if
            any weight is quantized.
        device: where it will be; on other devices than a CPU, its weights are dequantized.

    Raises:
        ModelRefused: the file is damaged, lacks parts, or holds what is not known to be
            read correctly; the message names it in one sentence.
    """
    parts = read_parts(file)
    tensors = tuple(tensor for part in parts.values() for tensor in part.tensors)
    header = replace(parts[file], tensors=tensors)
    name = _architecture(header, file)
    architecture = FAMILIES[name]
    if importlib.util.find_spec(LIBRARY) is None:
        raise ModelRefused(f"{file} is a GGUF file, and {LIBRARY} is missing; it comes with "
                           f"{GGUF_EXTRA}")  # fmt: skip
    for path, part in parts.items():
        check_extents(part, path, _blocks(part, path))
    check_metadata(header, name, file)
    check_tensors(header, name, file)
    try:
        config = architecture.config(header, name)
    except Exception as error:
        raise ModelRefused(f"the metadata of {file} is not usable: {first_line(error)}") from error
    check_sizes(header, name, config, file)
    if name == "llama":
        _scale_frequencies(parts, config)
    stored: dict[str, StoredBlocks] = {}
    for path, part in parts.items():
        stored |= stored_blocks(part, path, architecture, config)
    dtype = dtype or _stored_dtype(header)
    model = _model(config, _state_dict(stored, architecture, dtype, file), dtype, file)
    kept = {key: blocks for key, blocks in stored.items() if blocks.can_be_kept}
    embedding = MODEL_TENSORS[EMBEDDING]
    if config.tie_word_embeddings and embedding in kept:
        kept[HEAD] = kept[embedding]
    keep_stored(model, kept)
    if device.type != "cpu":
        dequantize(model)
        kept = {}
    return GgufModel(
        model, tuple(parts), _end_tokens(header, config.vocab_size), MappingProxyType(kept)
    )


def content_of(files: Sequence[Path]) -> "hashlib._Hash":
    """A hash of all bytes of a model's files, and of how they were dequantized."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    digest.update(f"dequantized by gguf {version('gguf')}\n".encode())
    return digest


def _architecture(header: GgufHeader, file: Path) -> str:
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise ModelRefused(f"{file} is not a model; its general.type is {kind!r}")
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelRefused(f"{file} has no general.architecture in its metadata")
    if architecture not in FAMILIES:
        raise ModelRefused(
            f"{file} has the architecture {architecture!r}; GGUF files are served of "
            f"{', '.join(FAMILIES)}, and other models as a folder with safetensors"
        )
    return architecture


def _blocks(header: GgufHeader, file: Path) -> dict[int, tuple[int, int]]:
    """Elements and bytes of a block, for each type in the file that can be dequantized."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    blocks: dict[int, tuple[int, int]] = {}
    for tensor in header.tensors:
        if tensor.ggml_type in blocks:
            continue
        name = f"number {tensor.ggml_type}"
        try:
            kind = GGMLQuantizationType(tensor.ggml_type)
            name = kind.name
            blocks[tensor.ggml_type] = GGML_QUANT_SIZES[kind]
            # The library has no list of the types that it can dequantize.
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise ModelRefused(
                f"{file} stores {tensor.name} in the type {name}, which gguf {version('gguf')} "
                "cannot dequantize; use another quantization, as Q8_0 or Q4_K_M"
            ) from error
    return blocks


def _scale_frequencies(parts: Mapping[Path, GgufHeader], config: PreTrainedConfig) -> None:
    """Add the scaling of the rotary frequencies, which is not in the metadata."""
    theta = float(config.rope_parameters["rope_theta"])
    for path, part in parts.items():
        parameters = rotary_parameters(part, path, theta=theta, head_dim=head_dim_of(config))
        if parameters is not None:
            config.rope_parameters = dict(parameters)


def _stored_dtype(header: GgufHeader) -> torch.dtype:
    types = {tensor.ggml_type for tensor in header.tensors}
    if not types <= _PLAIN_TYPES.keys():
        return torch.float32
    # Vectors are float32 in every file, so the type of the matrices is that of the model.
    matrices = {_PLAIN_TYPES[tensor.ggml_type] for tensor in header.tensors if tensor.shape[1:]}
    return matrices.pop() if len(matrices) == 1 else torch.float32


def _end_tokens(header: GgufHeader, vocab_size: int) -> frozenset[int]:
    values = (header.metadata.get(f"tokenizer.ggml.{key}") for key in END_KEYS)
    return frozenset(one for one in values if type(one) is int and 0 <= one < vocab_size)


def _state_dict(
    stored: Mapping[str, StoredBlocks],
    architecture: GgufArchitecture,
    dtype: torch.dtype,
    file: Path,
) -> Mapping[str, torch.Tensor]:
    """The weights by their names in the model; stand-ins for those that are kept."""
    state: dict[str, torch.Tensor] = {}
    # A part of a tensor comes before the next one.
    for name, blocks in sorted(stored.items()):
        if not blocks.is_finite():
            raise ModelRefused(f"{file} is damaged: {name} has values that are not finite")
        if not blocks.has_the_values_of_the_library():
            raise ModelRefused(
                f"gguf {version('gguf')} dequantizes the type {blocks.kind}, of {name} in {file}, "
                "to other values than this engine; use the folder with safetensors"
            )
        if blocks.can_be_kept:
            state[name] = stand_in(blocks.shape, dtype)
            continue
        values = blocks.dequantized()
        if values.dim() == 1 and name.endswith("norm.weight"):
            values = values - architecture.norm_offset
        if values.dim() == 3 and architecture.has_transposed_experts:
            values = values.mT
        whole, _, place = name.partition("/")
        state[whole] = _placed(values.to(dtype), place, state.get(whole))
    return state


def _placed(values: torch.Tensor, place: str, earlier: torch.Tensor | None) -> torch.Tensor:
    """A weight of a part, which `GgufArchitecture.more_tensors` places, and the part before it."""
    if place == "row":
        return values[None]
    if earlier is None:
        return values
    if place == "odd":
        return torch.stack((earlier, values), dim=-1).flatten(-2)
    return torch.cat((earlier, values), dim=1)


def _model(
    config: PreTrainedConfig, state: Mapping[str, torch.Tensor], dtype: torch.dtype, file: Path
) -> PreTrainedModel:
    """The model of a state dict, with whose memory it computes."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelRefused(f"transformers cannot load {file}: {first_line(error)}") from error
    assert isinstance(model, PreTrainedModel)
    lacking = [*report["missing_keys"], *report["mismatched_keys"], *report["unexpected_keys"]]
    if lacking:
        raise ModelRefused(
            f"the weights of {file} do not fit its metadata: {min(map(str, lacking))}"
        )
    return model


def first_line(error: Exception) -> str:
    """The first line of an error's text, and the next one if the first ends with a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])
