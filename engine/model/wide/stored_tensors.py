"""Names, types and shapes of a checkpoint's tensors, from the headers of its safetensors files.

Knows no model and reads no weights. It reads exactly the files that transformers would load. The
format of a header is described in the README of safetensors, under "Format".
"""

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from transformers.utils.hub import cached_file

from engine.errors import ModelRefused

#: The files that transformers looks for, in its order; an index lists the files of the weights.
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: The most bytes of a header; safetensors itself reads no larger one.
MAX_HEADER_BYTES = 100_000_000
#: The most bytes of an index. An index of 100,000 tensors has about 10 million.
MAX_INDEX_BYTES = 100_000_000
#: The most dimensions of a tensor; weights have up to five.
MAX_DIMENSIONS = 16
#: A file starts with the size of its header, as a little-endian integer of so many bytes.
SIZE_BYTES = 8

#: The most characters of a tensor's name that a refusal repeats.
MAX_SHOWN = 100

#: Names of a distributed checkpoint's files. transformers would load them instead of the others.
DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")

#: Finds a file of the checkpoint by its name; None if there is none.
FindFile = Callable[[str], Path | None]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Args:
        file: the name of its file in the checkpoint.
        dtype: in the notation of safetensors, such as "BF16" or "F8_E4M3".
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]


def finder(path: str | Path, folder: Path) -> FindFile:
    """Finds files of a model in its `folder`; if `path` is a name on the hub, also downloads them.

    Raises:
        ModelRefused: the folder has a distributed checkpoint.
    """
    if Path(path).is_dir():
        for file in sorted(folder.iterdir()):
            if DISTRIBUTED.match(file.name):
                raise ModelRefused(
                    f"{file.name} is a part of a distributed checkpoint: save it with "
                    "save_pretrained, without distributed parts"
                )
        return lambda name: folder / name if (folder / name).is_file() else None
    return lambda name: _downloaded(str(path), name)


def _downloaded(path: str, name: str) -> Path | None:
    try:
        file = cached_file(
            path,
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError as error:
        raise ModelRefused(f"{name} cannot be downloaded: {str(error).splitlines()[0]}") from error
    return None if file is None else Path(file)


def stored_tensors(find: FindFile, named: object = None) -> Iterator[StoredTensor]:
    """All tensors that transformers would load.

    Args:
        find: finds a file of the checkpoint.
        named: the value of `transformers_weights` in config.json, which replaces the usual names.

    Raises:
        ModelRefused: a file is missing or damaged; the message has its name.
    """
    for name in _weight_files(find, named):
        file = find(name)
        if file is None:
            raise ModelRefused(f"the checkpoint lacks its weight file {name}: download it again")
        yield from _tensors(file, name)


def by_name(tensors: Iterable[StoredTensor]) -> Mapping[str, StoredTensor]:
    """Tensors by their names.

    Raises:
        ModelRefused: two files have a tensor of one name, so that the order of reading would decide
            which of them is meant.
    """
    found: dict[str, StoredTensor] = {}
    for tensor in tensors:
        other = found.setdefault(tensor.name, tensor)
        if other is not tensor:
            raise ModelRefused(
                f"{other.file} and {tensor.file} both have {tensor.name}: remove the file that is "
                "not of this checkpoint"
            )
    return found


def _weight_files(find: FindFile, named: object) -> list[str]:
    if named is None:
        if find(WEIGHTS) is not None:
            return [WEIGHTS]
        named = INDEX
    name = _checked_name(named, "config.json")
    if not name.endswith(".json"):
        return [name]
    index = find(name)
    if index is None:
        raise ModelRefused(f"the checkpoint has neither {WEIGHTS} nor {INDEX}")
    files = _mapping(_json(_read(index, name, MAX_INDEX_BYTES), name).get("weight_map"), name)
    if not files:
        raise ModelRefused(f"{name} lists no weights: download it again")
    return sorted({_checked_name(file, name) for file in files.values()})


def _checked_name(value: object, source: str) -> str:
    """The name of a weight file inside the checkpoint."""
    path = PurePosixPath(value) if isinstance(value, str) else None
    if path is None or path.is_absolute() or ".." in path.parts or "\\" in str(path):
        raise ModelRefused(f"{source} names {value!r} as a weight file, which is no file beside it")
    if not path.name.endswith((".safetensors", ".safetensors.index.json")):
        raise ModelRefused(f"{source} names the weight file {path}, which is not safetensors")
    return str(path)


def _tensors(file: Path, name: str) -> Iterator[StoredTensor]:
    for tensor, value in _header(file, name).items():
        if tensor == "__metadata__":
            continue
        facts = _mapping(value, name)
        dtype, shape = facts.get("dtype"), facts.get("shape")
        if not isinstance(dtype, str) or not isinstance(shape, list) or not _are_sizes(shape):
            raise _damaged(name, f"its header gives no type and shape for {tensor}")
        yield StoredTensor(tensor, name, dtype, tuple(shape))


def _header(file: Path, name: str) -> Mapping[str, Any]:
    """The JSON object at the start of a file; ModelRefused if a tensor ends after the file."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(SIZE_BYTES), "little")
            rest = file.stat().st_size - SIZE_BYTES
            if size > min(rest, MAX_HEADER_BYTES):
                raise _damaged(name, "the size of its header is impossible")
            header = _json(stream.read(size), name, once=True)
    except OSError as error:
        raise ModelRefused(f"{name} cannot be read: {error.strerror}") from error
    ends = [
        facts["data_offsets"][1]
        for facts in header.values()
        if isinstance(facts, dict) and _is_range(facts.get("data_offsets"))
    ]
    if size + max(ends, default=0) > rest:
        raise _damaged(name, "it ends before its last tensor")
    return header


def _read(file: Path, name: str, most: int) -> bytes:
    try:
        with file.open("rb") as stream:
            data = stream.read(most + 1)
    except OSError as error:
        raise ModelRefused(f"{name} cannot be read: {error.strerror}") from error
    if len(data) > most:
        raise ModelRefused(f"{name} has more than {most} bytes")
    return data


def _json(data: bytes, name: str, *, once: bool = False) -> Mapping[str, Any]:
    """A JSON object; with `once`, no object may have a name twice."""
    try:
        value = json.loads(data, object_pairs_hook=functools.partial(_once, name) if once else None)
    except (ValueError, RecursionError) as error:
        raise _damaged(name, "it has no JSON where it must have some") from error
    return _mapping(value, name)


def _once(name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers differ in which of two values of one name they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _damaged(name, f"its header has {twice[:MAX_SHOWN]} twice")
    return found


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _damaged(name, "it has no JSON object where it must have one")
    return value


def _are_sizes(values: list[Any]) -> bool:
    """Whether a tensor may have this shape. The product of many large numbers takes long."""
    return (
        len(values) <= MAX_DIMENSIONS
        and all(type(value) is int and 0 <= value < 2**63 for value in values)
        and math.prod(values) < 2**63
    )


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(end) is int for end in value)


def _damaged(name: str, reason: str) -> ModelRefused:
    return ModelRefused(f"{name} is damaged ({reason}): download or save it again")
