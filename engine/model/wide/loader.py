"""Loads a transformers model from a Hugging Face folder or name, or says in a sentence why not.

Knows no attention backend and no cache. Weights are read from safetensors only and no code that
comes with a model is ever run: a pickle or a remote module may do anything to the process that
holds the keys.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file

from engine.errors import ModelRefused
from engine.model.wide.transformers_model import ATTENTION_NAME

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

#: Weight files that are pickles.
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})

#: Files beside the weights that affect tokens, those of the prompt included; any may be missing.
DECIDING_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
#: The fingerprint of a weight file covers so many pieces of so many bytes, evenly spread: training
#: changes nearly all of them, and reading the whole file would take as long as loading it.
NUM_PIECES, PIECE_BYTES = 256, 4096


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode on its device, and the facts an engine needs about it.

    Args:
        model: with our attention function set.
        folder: the local folder; tokenizer files are here.
        max_model_len: positions the model can tell apart and the engine can compute in any batch.
        eos_token_ids: of the generation config and of the config; either may know one the other
            lacks.
        fingerprint: changes with the config, the tokenizer, the weights, the dtype, torch,
            transformers, and the kind of processor.
    """

    model: PreTrainedModel
    folder: Path
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    fingerprint: str


def load_model(
    path: str | Path, *, dtype: str = "auto", device: torch.device | str = "cpu"
) -> LoadedModel:
    """Load a causal language model for serving.

    Args:
        path: a folder, or a name that transformers resolves by its own rules (cache, offline mode);
            a name that the hub cannot have, or whose owner is a folder here, is a folder's.
        dtype: a key of `DTYPES`, or "auto" for the one the checkpoint names.
        device: where the weights go.

    Raises:
        ModelRefused: the model cannot be served; the message is one sentence.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelRefused(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    folder = _folder(path)
    _check_files(folder, path)
    config = _config(folder)
    _check_architecture(config)
    model = _read_weights(path, dtype)
    if model.dtype not in DTYPES.values():
        raise ModelRefused(f"{path} is stored as {model.dtype}; ask for one of {', '.join(DTYPES)}")
    model.requires_grad_(requires_grad=False)
    _place(model, device)
    return LoadedModel(
        model=model,
        folder=folder,
        max_model_len=_max_model_len(model),
        eos_token_ids=_eos_token_ids(model),
        dtype=model.dtype,
        fingerprint=_fingerprint(folder, model),
    )


def _place(model: PreTrainedModel, device: torch.device | str) -> None:
    try:
        torch.nn.Module.to(model, device)
    except (RuntimeError, AssertionError) as error:
        # torch asserts that it was built for the device.
        raise ModelRefused(f"the weights cannot go to {device}: {_first_line(error)}") from error


def _folder(path: str | Path) -> Path:
    if Path(path).is_dir():
        return Path(path)
    if Path(path).is_file():
        raise ModelRefused(f"{path} is a file; a model is the folder with its config.json in it")
    if isinstance(path, Path) or not _may_be_of_hub(path):
        raise ModelRefused(_no_folder(path))
    try:
        config_file = cached_file(path, "config.json")
    except OSError as error:
        # What was meant may have been a folder all the same.
        reason = f"no model of that name came from the hub: {_first_line(error)}"
        raise ModelRefused(f"{_no_folder(path)}, and {reason}") from error
    assert config_file is not None, "a missing file raises"
    return Path(config_file).parent


def _may_be_of_hub(name: str) -> bool:
    """Whether this may be `<model>` or `<owner>/<model>` of the hub, and not a mistyped folder.

    Where the owner is a folder here, a folder in it was meant: the hub would only say that it has
    no such model, or that it cannot be reached.
    """
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        return False
    return "/" not in name or not Path(name).parent.is_dir()


def _no_folder(path: str | Path) -> str:
    """Says what was looked for; of a relative one, also where."""
    return f"there is no folder {path}" + ("" if Path(path).is_absolute() else f" in {Path.cwd()}")


def _check_files(folder: Path, path: str | Path) -> None:
    """Refuse a local folder early by what lies in it; of a name, not everything is here yet."""
    if not (folder / "config.json").is_file():
        raise ModelRefused(f"{path} has no config.json")
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
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(f"config.json cannot be read: {_first_line(error)}") from error
    if not isinstance(raw, dict):
        raise ModelRefused("config.json is no JSON object")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        if raw.get("auto_map"):
            raise ModelRefused(
                f"a model of type {model_type!r} brings its own code, which is never run here"
            )
        raise ModelRefused(f"transformers {transformers.__version__} knows no type {model_type!r}")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        # A class of its own for a field of the wrong type, and whatever follows from a wrong value.
        raise ModelRefused(f"config.json is not usable: {_first_line(error)}") from error
    return config


def _check_architecture(config: PreTrainedConfig) -> None:
    """Refuse what can be told before any weight is read; the rest is the probe's."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ModelRefused(f"{kind} is an encoder-decoder model; only decoders are served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelRefused(f"{kind} is not a causal language model in transformers")
    if getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_is_stateful", False):
        raise ModelRefused(
            f"{kind} keeps a recurrent state beside its keys and values (state-space or linear "
            "attention layers), which cannot be paged"
        )


def _read_weights(path: str | Path, dtype: str) -> PreTrainedModel:
    try:
        # Annotated, because the type of the result depends on `output_loading_info`.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=DTYPES.get(dtype, "auto"),
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        if isinstance(error, KeyError) and ATTENTION_NAME in error.args:
            # Its layers are picked from a table of their own by the name of the attention.
            raise ModelRefused(
                f"{path} does not dispatch its attention through transformers' AttentionInterface"
            ) from error
        raise ModelRefused(f"transformers cannot load {path}: {_first_line(error)}") from error
    model, report = loaded
    assert isinstance(model, PreTrainedModel)
    # transformers fills what is missing with random numbers and a warning.
    if report["missing_keys"]:
        raise ModelRefused(
            f"the weights of {path} lack {len(report['missing_keys'])} tensors, "
            f"{min(report['missing_keys'])} among them"
        )
    return model


def _max_model_len(model: PreTrainedModel) -> int:
    """Positions of the config, fewer where the rotary frequencies follow the longest sequence.

    Such a model would compute every request of a batch with the frequencies of the longest one, and
    keys already in the cache would stay as they were. Below the original length they never change.
    """
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise ModelRefused(f"the config of {config.model_type} names no max_position_embeddings")
    for module in model.modules():
        for kind in _leaves(getattr(module, "rope_type", ())):
            if kind == "longrope" or "dynamic" in str(kind):
                original = _originals(getattr(config, "rope_parameters", None) or {})
                limit = min([limit, *original])
    return limit


def _originals(parameters: dict[str, Any]) -> Iterable[int]:
    """Every `original_max_position_embeddings`, of the model or of its kinds of layers."""
    for key, value in parameters.items():
        if isinstance(value, dict):
            yield from _originals(value)
        elif key == "original_max_position_embeddings" and value:
            yield int(value)


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    sources = (model.generation_config, model.config, model.config.get_text_config())
    return frozenset(
        int(token)
        for source in sources
        for token in _leaves(getattr(source, "eos_token_id", None))
        # Some configs name a negative one for none, and in a row that counts from the end.
        if token is not None and int(token) >= 0
    )


def _leaves(value: Any) -> Iterable[Any]:
    """The values themselves, whether there is one, a list of them or one per kind of layer."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def _fingerprint(folder: Path, model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name in DECIDING_FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + hashlib.sha256((folder / name).read_bytes()).digest())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for piece in range(NUM_PIECES):
                stream.seek(size * piece // NUM_PIECES)
                digest.update(stream.read(PIECE_BYTES))
    versions = f"{model.dtype} {torch.__version__} {transformers.__version__}"
    digest.update(f"{versions} {_processor(model.device)}".encode())
    return digest.hexdigest()[:32]


def _processor(device: torch.device) -> str:
    """What torch picks its kernels by: another kind may round differently."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device.type


def _first_line(error: BaseException) -> str:
    """What an error says first, and what comes after that if it is a heading."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])
