"""Loads the model of a GGUF file with dequantized weights, or refuses the file with a reason.

transformers and the library gguf read the file. They ignore metadata and tensors that they do not
know, and would then compute another model. So every key of the architecture and every tensor of
the file must be one that is known to be read. Knows no attention backend and no tokenizer.
"""

import hashlib
import importlib
import importlib.util
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.errors import ModelRefused
from engine.model.wide.gguf_blocks import StoredBlocks, stored_blocks
from engine.model.wide.gguf_header import GgufHeader, check_extents, read_header
from engine.model.wide.gguf_rotary import DIVISORS, rotary_parameters
from engine.model.wide.transformers_model import ATTENTION_NAME

#: The libraries that transformers needs to read such a file, and how to install them.
LIBRARIES = ("gguf", "accelerate")
GGUF_EXTRA = "the extra `gguf`: pip install -c constraints.txt -e '.[gguf]'"

#: The metadata keys after the architecture's name that transformers reads, or that are compared
#: with its configuration below. The first group must be there.
NEEDED_KEYS = (
    "context_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
)
OPTIONAL_KEYS = ("vocab_size", "rope.freq_base")
#: Keys whose values must equal the configuration's size of a head.
HEAD_KEYS = ("rope.dimension_count", "attention.key_length", "attention.value_length")

_MODEL_TENSORS = ("token_embd.weight", "output_norm.weight")
#: Absent where the output layer has the weights of the embedding.
_OUTPUT = "output.weight"
_LAYER_TENSORS = (
    "attn_norm.weight",
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_output.weight",
    "ffn_norm.weight",
    "ffn_gate.weight",
    "ffn_up.weight",
    "ffn_down.weight",
)
_QK_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """What distinguishes the files of one architecture.

    Args:
        model_type: the type that transformers gives to its configuration.
        tensors: of each layer, beside _LAYER_TENSORS.
        keys: metadata that must be there, beside NEEDED_KEYS.
        assumed: metadata that transformers does not read, each with the value that it assumes. A
            file may state that value, and no other.
    """

    model_type: str
    tensors: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    assumed: tuple[tuple[str, float], ...] = ()


#: By the architecture's name in the file.
FAMILIES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama"),
    "qwen2": GgufArchitecture("qwen2", ("attn_q.bias", "attn_k.bias", "attn_v.bias")),
    "qwen3": GgufArchitecture("qwen3", _QK_NORMS),
    "gemma3": GgufArchitecture(
        "gemma3_text",
        (*_QK_NORMS, "post_attention_norm.weight", "post_ffw_norm.weight"),
        keys=("attention.sliding_window", "rope.freq_base"),
        # Of the layers with a window.
        assumed=(("rope.freq_base_swa", 10000.0),),
    ),
}
#: The number of layers of the one Gemma 3 whose scores are scaled otherwise than by the size of a
#: head. The file does not state the scale; llama.cpp derives it from this number.
GEMMA3_OTHER_SCALE_LAYERS = 62

#: The metadata keys of the tokens that end an answer: of a text, of a turn, of a message.
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

#: ggml's numbers of the types that are not quantized, with their name in torch.
_PLAIN_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}

_NAME = "model.gguf"


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model with dequantized weights, and the end tokens that the file names.

    Args:
        stored: as in `LoadedModel`.
    """

    model: PreTrainedModel
    eos_token_ids: frozenset[int]
    stored: Mapping[str, StoredBlocks]


def is_gguf_name(path: str | Path) -> bool:
    """Whether it is named like a GGUF file, whether or not there is one."""
    return Path(path).suffix.lower() == ".gguf"


def load_gguf(file: Path, *, dtype: torch.dtype | None) -> GgufModel:
    """The model of a GGUF file, on the CPU.

    Args:
        file: an existing file.
        dtype: the type of the dequantized weights; None for that of the file, which is float32 if
            any weight is quantized.

    Raises:
        ModelRefused: the file is damaged, is part of a model, or holds what is not known to be
            read correctly; the message names it in one sentence.
    """
    header = read_header(file)
    architecture = _architecture(header, file)
    _check_libraries(file)
    check_extents(header, file, _blocks(header, file))
    _check_metadata(header, architecture, file)
    _check_tensors(header, architecture, file)
    with _alone(file) as folder:
        config = _config(folder, file)
        _check_sizes(header, architecture, config, file)
        if architecture == "llama":
            _scale_frequencies(header, config, file)
        model = _read(folder, config, file, dtype or _stored_dtype(header))
    return GgufModel(model, _end_tokens(header), stored_blocks(header, file, model))


def content_of(file: Path) -> "hashlib._Hash":
    """A hash of all bytes of a GGUF file, and of how they were dequantized."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    digest.update(f"\ndequantized by gguf {version('gguf')}\n".encode())
    return digest


def _architecture(header: GgufHeader, file: Path) -> str:
    count = header.metadata.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        number = header.metadata.get("split.no", 0)
        raise ModelRefused(
            f"{file} is one of the {count} parts of a model (split.no is {number}); join them "
            "with `llama-gguf-split --merge` and name the result"
        )
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


def _check_libraries(file: Path) -> None:
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelRefused(f"{file} is a GGUF file, and {missing[0]} is missing; it comes with "
                           f"{GGUF_EXTRA}")  # fmt: skip


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


def _check_metadata(header: GgufHeader, architecture: str, file: Path) -> None:
    prefix, family = f"{architecture}.", FAMILIES[architecture]
    for key in (*NEEDED_KEYS, *family.keys):
        if prefix + key not in header.metadata and prefix + key not in header.lengths:
            raise ModelRefused(f"{file} has no {prefix}{key} in its metadata")
    own = (*family.keys, *(key for key, _ in family.assumed))
    known = {prefix + key for key in (*NEEDED_KEYS, *OPTIONAL_KEYS, *HEAD_KEYS, *own)}
    for key, assumed in family.assumed:
        if header.metadata.get(prefix + key, assumed) != assumed:
            raise ModelRefused(
                f"{file} sets {prefix + key} to {header.metadata[prefix + key]}, and transformers "
                f"assumes {assumed}"
            )
    for key in (*header.metadata, *header.lengths):
        if not key.startswith(prefix):
            continue
        if key in header.lengths:
            raise ModelRefused(f"{file} has a value for each layer in {key}, which is not served")
        if key == f"{prefix}rope.scaling.type" and header.metadata[key] == "none":
            continue
        if key not in known:
            raise ModelRefused(
                f"{file} sets {key} to {header.metadata[key]!r}, which transformers "
                f"{transformers.__version__} does not read from such a file"
            )


def _check_tensors(header: GgufHeader, architecture: str, file: Path) -> None:
    num_layers = int(header.metadata[f"{architecture}.block_count"])
    layer_tensors = (*_LAYER_TENSORS, *FAMILIES[architecture].tensors)
    names = {tensor.name for tensor in header.tensors}
    for name in _MODEL_TENSORS:
        if name not in names:
            raise ModelRefused(f"{file} lacks the tensor {name}")
    # The first layer that is missing ends the loop, however large the number of layers is.
    for layer in range(num_layers):
        for name in layer_tensors:
            if f"blk.{layer}.{name}" not in names:
                raise ModelRefused(f"{file} lacks the tensor blk.{layer}.{name}")
    read = {*_MODEL_TENSORS, _OUTPUT, *([DIVISORS] if architecture == "llama" else [])}
    for name in sorted(names - read):
        part = re.fullmatch(r"blk\.(\d{1,6})\.(.+)", name)
        if part is None or int(part[1]) >= num_layers or part[2] not in layer_tensors:
            raise ModelRefused(
                f"{file} has the tensor {name}, which transformers {transformers.__version__} "
                f"does not read for the architecture {architecture!r}"
            )


def _check_sizes(
    header: GgufHeader, architecture: str, config: PreTrainedConfig, file: Path
) -> None:
    """Refuse sizes that contradict the tensors: memory would be allocated for them."""
    family = FAMILIES[architecture]
    if config.model_type != family.model_type:
        raise ModelRefused(f"{file} is read by transformers as {config.model_type!r}, not as "
                           f"{family.model_type!r}")  # fmt: skip
    heads, head_dim = config.num_attention_heads, _head_dim(config)
    for key in HEAD_KEYS:
        value = header.metadata.get(f"{architecture}.{key}", head_dim)
        if value != head_dim:
            raise ModelRefused(
                f"{file} sets {architecture}.{key} to {value}, and transformers reads a head of "
                f"{head_dim}"
            )
    if architecture == "gemma3":
        _check_scale(config, file)
    hidden = config.hidden_size
    expected = {
        "token_embd.weight": (hidden, config.vocab_size),
        "blk.0.attn_q.weight": (hidden, heads * head_dim),
        "blk.0.attn_k.weight": (hidden, config.num_key_value_heads * head_dim),
        "blk.0.ffn_up.weight": (hidden, config.intermediate_size),
    }
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ModelRefused(
                f"{file} stores {name} with the shape {shapes[name]}; its metadata says {shape}"
            )


def _scale_frequencies(header: GgufHeader, config: PreTrainedConfig, file: Path) -> None:
    """Add the scaling of the rotary frequencies, which transformers does not read from a file."""
    theta = float(config.rope_parameters["rope_theta"])
    parameters = rotary_parameters(header, file, theta=theta, head_dim=_head_dim(config))
    if parameters is not None:
        config.rope_parameters = dict(parameters)


def _check_scale(config: PreTrainedConfig, file: Path) -> None:
    """Refuse a Gemma 3 whose scores transformers would scale otherwise than it was trained."""
    scaled_by = config.query_pre_attn_scalar
    if config.num_hidden_layers == GEMMA3_OTHER_SCALE_LAYERS or config.head_dim != scaled_by:
        raise ModelRefused(
            f"{file} is a Gemma 3 with {config.num_hidden_layers} layers and heads of "
            f"{config.head_dim}; transformers scales the scores of every such file for heads of "
            f"{scaled_by}, which is wrong for it; use the folder with safetensors"
        )


def _head_dim(config: PreTrainedConfig) -> int:
    heads = config.num_attention_heads
    return int(getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1))


def _stored_dtype(header: GgufHeader) -> torch.dtype:
    types = {tensor.ggml_type for tensor in header.tensors}
    if not types <= _PLAIN_TYPES.keys():
        return torch.float32
    # Vectors are float32 in every file, so the type of the matrices is that of the model.
    matrices = {_PLAIN_TYPES[tensor.ggml_type] for tensor in header.tensors if tensor.shape[1:]}
    return matrices.pop() if len(matrices) == 1 else torch.float32


def _end_tokens(header: GgufHeader) -> frozenset[int]:
    values = (header.metadata.get(f"tokenizer.ggml.{key}") for key in END_KEYS)
    return frozenset(value for value in values if isinstance(value, int))


@contextmanager
def _alone(file: Path) -> Iterator[Path]:
    """A folder in which the file is alone: transformers also reads what lies beside a file."""
    with tempfile.TemporaryDirectory(prefix="quire-gguf-") as folder:
        (Path(folder) / _NAME).symlink_to(file.resolve())
        yield Path(folder)


def _config(folder: Path, file: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(folder), gguf_file=_NAME)
    except Exception as error:
        raise ModelRefused(f"the metadata of {file} is not usable: {first_line(error)}") from error
    return config


def _read(
    folder: Path, config: PreTrainedConfig, file: Path, dtype: torch.dtype
) -> PreTrainedModel:
    try:
        with _without_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder),
                config=config,
                gguf_file=_NAME,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:
        raise ModelRefused(f"transformers cannot load {file}: {first_line(error)}") from error
    model, report = loaded
    assert isinstance(model, PreTrainedModel)
    if report["missing_keys"]:
        raise ModelRefused(f"{file} lacks the weights of {min(report['missing_keys'])}")
    # The weights are plain tensors now; what transformers notes of their origin is of no use.
    del model.config.quantization_config
    return model


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Keep the reader's bar out of the log; it does not follow transformers' own switch."""
    reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    bar = reader.tqdm
    reader.tqdm = lambda tensors, **_: tensors
    try:
        yield
    finally:
        reader.tqdm = bar


def first_line(error: Exception) -> str:
    """The first line of an error's text, and the next one if the first ends with a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])
