"""What a model folder says about its vectors: the layout of sentence-transformers, or its classes.

Knows no weights. A module that is not served is a reason to refuse the model: without it the
vectors would be others.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.errors import ModelRefused

#: What a model makes: text, embeddings, or the scores of a classification head.
Task = Literal["generate", "embed", "classify"]
PoolingMode = Literal["cls", "mean", "max", "lasttoken"]
POOLING_MODES: tuple[PoolingMode, ...] = ("cls", "mean", "max", "lasttoken")

MODULES = "modules.json"
#: The end of a class name in config.json whose model has a classification head.
CLASSIFIER = "ForSequenceClassification"
#: Fields of older pooling files: a switch for each mode.
_SWITCHES: Mapping[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorFolder:
    """How the vectors of a folder are made.

    Args:
        weights: the folder with config.json, weights and tokenizer.
        mode: which token's hidden state is the vector, or what is made of all of them.
        normalizes: whether vectors have the length 1.
        prompts: texts that are put before an input, by name.
        default_prompt: the one for inputs that name none; empty for none.
        max_tokens: the longest prompt that the folder allows; None for that of the model.
        lowers: whether texts are put into lower case.
    """

    weights: Path
    mode: PoolingMode
    normalizes: bool
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    max_tokens: int | None = None
    lowers: bool = False


def task_of(folder: Path) -> Task:
    """What a folder's model makes, by its files; `generate` if they do not say it."""
    if (folder / MODULES).is_file():
        return "embed"
    if not (folder / "config.json").is_file():
        return "generate"
    names = _read_object(folder / "config.json").get("architectures") or []
    if any(isinstance(name, str) and name.endswith(CLASSIFIER) for name in names):
        return "classify"
    return "generate"


def vector_folder(folder: Path, *, mode: PoolingMode | None, default: PoolingMode) -> VectorFolder:
    """How the folder's embeddings are made.

    A folder in the layout of sentence-transformers says it; `mode` replaces its pooling. For any
    other folder it is `mode`, or `default`, and vectors of length 1.

    Raises:
        ModelRefused: a file is damaged, or a module of the folder is not served.
    """
    if not (folder / MODULES).is_file():
        return VectorFolder(weights=folder, mode=mode or default, normalizes=True)
    weights, found, normalizes = folder, None, False
    for module in _read_list(folder / MODULES):
        kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path") or "")
        if not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise ModelRefused(f"{MODULES} of {folder} names a folder outside of it: {path!r}")
        if kind == "Transformer":
            weights = folder / path
        elif kind == "Pooling":
            found = _pooling_in(folder / path / "config.json")
        elif kind == "Normalize":
            normalizes = True
        else:
            raise ModelRefused(f"{folder} has a module {kind!r}, which is not served")
    if found is None and mode is None:
        raise ModelRefused(f"{folder} has no pooling module; set pooling to one of {POOLING_MODES}")
    own = _read_object(folder / "config_sentence_transformers.json", must_exist=False)
    prompts = {str(name): str(text) for name, text in (own.get("prompts") or {}).items()}
    default_name = own.get("default_prompt_name")
    if default_name is not None and default_name not in prompts:
        raise ModelRefused(f"{folder} has no prompt {default_name!r}, which is its default")
    sizes = _read_object(weights / "sentence_bert_config.json", must_exist=False)
    most = sizes.get("max_seq_length")
    return VectorFolder(
        weights=weights,
        mode=mode or found or default,
        normalizes=normalizes,
        prompts=prompts,
        default_prompt=prompts.get(default_name, "") if default_name else "",
        max_tokens=most if isinstance(most, int) and most > 0 else None,
        lowers=bool(sizes.get("do_lower_case")),
    )


def _pooling_in(file: Path) -> PoolingMode:
    config = _read_object(file)
    if config.get("include_prompt") is False:
        raise ModelRefused(f"{file} leaves prompts out of the pooling, which is not served")
    named = config.get("pooling_mode")
    if named is None:
        named = [_SWITCHES.get(name, name) for name, value in config.items() if _is_on(name, value)]
    modes = [named] if isinstance(named, str) else list(named)
    for mode in POOLING_MODES:
        if modes == [mode]:
            return mode
    raise ModelRefused(f"{file} has the pooling {modes}; served is one of {POOLING_MODES}")


def _is_on(name: str, value: object) -> bool:
    return name.startswith("pooling_mode_") and value is True


def _read_object(file: Path, *, must_exist: bool = True) -> dict[str, Any]:
    if not must_exist and not file.is_file():
        return {}
    found = _read(file)
    if not isinstance(found, dict):
        raise ModelRefused(f"{file} is not a JSON object")
    return found


def _read_list(file: Path) -> list[dict[str, Any]]:
    found = _read(file)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ModelRefused(f"{file} is not a JSON array of objects")
    return found


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(f"{file} cannot be read: {error}") from error
