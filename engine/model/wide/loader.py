"""Loads a transformers model from a folder, a name or a GGUF file, or refuses it with a reason.

Knows no attention backend and no cache. Weights are read only from safetensors or GGUF, and no code
of a model repository is ever run: a pickle or a remote module could run any code in this process,
which has the credentials of Redis.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file

from engine.errors import ModelRefused
from engine.model.kernels.quantized import StoredWeight
from engine.model.wide.config_limits import MAX_CONFIG_BYTES, refuse_limitless
from engine.model.wide.fingerprint import content_of_folder, fingerprint_of
from engine.model.wide.folder_weights import NOTE, quantized_form, read_folder
from engine.model.wide.gguf_loader import content_of, first_line, is_gguf_name, load_gguf
from engine.model.wide.mixers import has_mixers, mixers_in
from engine.model.wide.picture_reader import may_read_pictures
from engine.model.wide.quantization import refuse_quantized_config
from engine.model.wide.text_only import is_wrapper, refuse_unknown_wrapper

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

#: The longest request of a model with a recurrent state whose config names no positions.
LENGTH_WITHOUT_POSITIONS = 1 << 16

#: Why types with a recurrent state are refused, if for more than the kind of their state.
REASONS = {
    "deepseek_v4": "attends to compressed keys and values, which no block of the cache has",
    **dict.fromkeys(
        ("qwen4_exp", "qwen4_exp_text"),
        "attends to tokens that an indexer selects, which paged attention does not compute",
    ),
}

#: Suffixes of weight files that are pickles.
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode on its device, and the facts an engine needs about it.

    Args:
        model: the model, with our attention function set.
        source: the local folder, which also has the tokenizer files, or the GGUF file.
        max_model_len: the most positions that the model distinguishes and that do not depend on
            other requests of a batch.
        eos_token_ids: the union of those in the generation config and in the config, since each may
            have ids that the other lacks.
        fingerprint: a hash of config, tokenizer files, weights, dtype, the versions of torch and
            transformers, and the type of processor. For a GGUF file it covers all bytes of the
            file, and that the wide path's weights are dequantized.
        stored: on a CPU, the weights whose parameters are stand-ins (`stored_layers.keep_stored`).
        reads_pictures: whether the model has its encoder of pictures.
        quantization: how `stored` was quantized at load; None if the checkpoint has it so.
    """

    model: PreTrainedModel
    source: Path
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    fingerprint: str
    stored: Mapping[str, StoredWeight] = field(default_factory=dict)
    reads_pictures: bool = False
    quantization: str | None = None


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    pictures: bool = False,
) -> LoadedModel:
    """Load a causal language model for serving.

    Args:
        path: a GGUF file, a folder, or a name that transformers resolves by its own rules (cache,
            offline mode). A name that is not valid on the hub, or whose owner is a local folder, is
            a folder.
        dtype: a key of `DTYPES`, or "auto" for that of the checkpoint. For a GGUF file with
            quantized weights that is float32.
        device: the device of the weights.
        pictures: whether to load the encoder of pictures, too, if the model's pictures can be read.

    Raises:
        ModelRefused: the model cannot be served; the message is one sentence.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelRefused(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    if is_gguf_name(path):
        return _load_gguf(Path(path), dtype, device)
    folder, config = opened(path)
    _check_architecture(config)
    reads_pictures = pictures and may_read_pictures(config)
    model, stored = read_folder(
        path,
        folder,
        config,
        dtype=DTYPES.get(dtype),
        device=device,
        pictures=reads_pictures,
    )
    if model.dtype not in DTYPES.values():
        known = ", ".join(DTYPES)
        raise ModelRefused(f"{path} is stored as {model.dtype}; set dtype to one of {known}")
    content = content_of_folder(folder, pictures=reads_pictures)
    loaded = _loaded(model, folder, content, device)
    return replace(loaded, stored=stored, reads_pictures=reads_pictures)


def opened(path: str | Path) -> tuple[Path, PreTrainedConfig]:
    """The local folder of a model and its config. ModelRefused."""
    folder = _folder(path)
    _check_files(folder, path)
    return folder, _config(folder)


def _load_gguf(file: Path, dtype: str, device: torch.device | str) -> LoadedModel:
    """Loads a GGUF file. `stored` are the weights as the file has them, quantized."""
    if not file.is_file():
        raise ModelRefused(_missing("file", file))
    read = load_gguf(file, dtype=DTYPES.get(dtype), device=torch.device(device))
    loaded = _loaded(
        read.model, file, content_of(read.files), device, eos_token_ids=read.eos_token_ids
    )
    return replace(loaded, stored=read.stored)


def _loaded(
    model: PreTrainedModel,
    source: Path,
    content: "hashlib._Hash",
    device: torch.device | str,
    *,
    eos_token_ids: frozenset[int] = frozenset(),
) -> LoadedModel:
    model.requires_grad_(requires_grad=False)
    _move(model, device)
    return LoadedModel(
        model=model,
        source=source,
        max_model_len=_max_model_len(model),
        eos_token_ids=_eos_token_ids(model) | eos_token_ids,
        dtype=model.dtype,
        fingerprint=fingerprint_of(content, model),
    )


def _move(model: PreTrainedModel, device: torch.device | str) -> None:
    try:
        torch.nn.Module.to(model, device)
    except (RuntimeError, AssertionError) as error:
        # torch raises an AssertionError if it was not built for the device.
        reason = first_line(error)
        raise ModelRefused(f"the weights cannot be moved to {device}: {reason}") from error


def _folder(path: str | Path) -> Path:
    if Path(path).is_dir():
        return Path(path)
    if Path(path).is_file():
        raise ModelRefused(
            f"{path} is a file; a model is the folder that contains config.json, or a .gguf file"
        )
    if isinstance(path, Path) or not _may_be_of_hub(path):
        raise ModelRefused(_missing("folder", path))
    try:
        config_file = cached_file(path, "config.json")
    except OSError as error:
        # The message also mentions the folder: the user may have meant one.
        reason = f"the hub has given no model of that name: {first_line(error)}"
        raise ModelRefused(f"{_missing('folder', path)}, and {reason}") from error
    assert config_file is not None, "a missing file raises"
    return Path(config_file).parent


def _may_be_of_hub(name: str) -> bool:
    """Whether this may be `<model>` or `<owner>/<model>` on the hub, and not a mistyped folder.

    If the owner is a local folder, the user meant a folder in it. A request to the hub would only
    fail with a misleading reason.
    """
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        return False
    return "/" not in name or not Path(name).parent.is_dir()


def _missing(what: str, path: str | Path) -> str:
    """A sentence with the missing file or folder and, for a relative path, the current folder."""
    return f"there is no {what} {path}" + ("" if Path(path).is_absolute() else f" in {Path.cwd()}")


def _check_files(folder: Path, path: str | Path) -> None:
    """Refuse a local folder early by its files; for a hub name, not all files are local yet."""
    if not (folder / "config.json").is_file():
        files = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"; to serve a GGUF file in it, name the file: {folder / files[0]}" if files else ""
        raise ModelRefused(f"{path} has no config.json{hint}")
    if not Path(path).is_dir() or any(folder.glob("*.safetensors")):
        return
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelRefused(
            f"the weights of {path} are pickled ({pickles[0]}), and a pickle can run any code: "
            "convert them to safetensors"
        )
    raise ModelRefused(f"{path} has no weights in safetensors format")


def _config(folder: Path) -> PreTrainedConfig:
    try:
        with (folder / "config.json").open(encoding="utf-8") as stream:
            text = stream.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise ModelRefused(f"config.json has more than {MAX_CONFIG_BYTES} bytes")
        raw = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(f"config.json cannot be read: {first_line(error)}") from error
    if not isinstance(raw, dict):
        raise ModelRefused("config.json is not a JSON object")
    refuse_limitless(raw)
    served = {NOTE} if quantized_form(raw) is not None else set()
    refuse_quantized_config({name: value for name, value in raw.items() if name not in served})
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        if raw.get("auto_map"):
            raise ModelRefused(
                f"a model of type {model_type!r} has its own code, which is never run here"
            )
        raise ModelRefused(f"transformers {transformers.__version__} has no type {model_type!r}")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        # transformers has its own exception for a field of the wrong type; wrong values raise any.
        raise ModelRefused(f"config.json is not usable: {first_line(error)}") from error
    return config


def _check_architecture(config: PreTrainedConfig) -> None:
    """Refuse what is known to fail before weights are read; the probe refuses the rest."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ModelRefused(f"{kind} is an encoder-decoder model; only decoders are served")
    if is_wrapper(config):
        return
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        refuse_unknown_wrapper(config)
        raise ModelRefused(f"{kind} is not a causal language model in transformers")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    is_stateful = getattr(model_class, "_is_stateful", False)
    if is_stateful and not has_mixers(model_class):
        reason = REASONS.get(kind, "has a recurrent state of a kind that is not served")
        raise ModelRefused(f"{kind} {reason}")


def _max_model_len(model: PreTrainedModel) -> int:
    """The positions of the config; fewer if rotary frequencies depend on the longest sequence.

    A model with a recurrent state may have no positions in its config, as if it has no attention or
    only windows. It gets a length that the block tables can have.

    Frequencies that depend on it would be those of the longest request for all requests of a batch,
    but cached keys would keep their old ones. Below the original length they are constant.
    """
    config = model.config.get_text_config()
    is_recurrent = next(mixers_in(model), None) is not None
    default = LENGTH_WITHOUT_POSITIONS if is_recurrent else None
    limit = getattr(config, "max_position_embeddings", default)
    if not isinstance(limit, int) or limit < 1:
        raise ModelRefused(f"the config of {config.model_type} has no max_position_embeddings")
    for module in model.modules():
        for kind in _leaves(getattr(module, "rope_type", ())):
            if kind == "longrope" or "dynamic" in str(kind):
                original = _originals(getattr(config, "rope_parameters", None) or {})
                limit = min([limit, *original])
    return limit


def _originals(parameters: dict[str, Any]) -> Iterable[int]:
    """Every `original_max_position_embeddings`, of the model or of its layer types."""
    for key, value in parameters.items():
        if isinstance(value, dict):
            yield from _originals(value)
        elif key == "original_max_position_embeddings" and value:
            yield int(value)


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    sources = (model.generation_config, model.config, model.config.get_text_config())
    return eos_token_ids_in(sources)


def eos_token_ids_in(sources: Iterable[object]) -> frozenset[int]:
    """The end-of-sequence tokens that any of some configs names."""
    return frozenset(
        int(token)
        for source in sources
        for token in _leaves(getattr(source, "eos_token_id", None))
        # Some configs have a negative id for none; as an index it would count from the end.
        if token is not None and int(token) >= 0
    )


def _leaves(value: Any) -> Iterable[Any]:
    """The values of a field that is one value, a list, or a mapping by layer type."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)
