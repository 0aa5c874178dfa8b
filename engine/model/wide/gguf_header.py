"""Reads the header of a GGUF file within fixed bounds, and refuses a damaged file with a reason.

The libraries that load such a file trust its counts and lengths. This module checks every count,
length and offset against the size of the file first, so that a broken or truncated file costs
bounded time and memory. Knows no architecture and no tensor values. The layout is that of version
3 of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

from engine.errors import ModelRefused

MAGIC = b"GGUF"
#: Versions of the format with the same layout. Version 1 had shorter counts and is not in use.
VERSIONS = (2, 3)
#: The largest header that is read. The vocabularies in use need 5 to 20 MB.
MAX_HEADER_BYTES = 128 << 20
#: Limits of what a header lists: keys, tensors, and elements of all arrays. The largest models in
#: use have a third of each at most.
MAX_KEYS, MAX_TENSORS, MAX_ARRAY_LENGTH = 4096, 65_536, 4 << 20
MAX_DIMENSIONS = 4
#: The most files of one model.
MAX_PARTS = 1000
#: A name is shown in messages and used as a key.
MAX_NAME_BYTES = 1024
#: The longest text that is kept; a longer one is skipped. Chat templates have up to 20 kB.
MAX_TEXT_BYTES = 1 << 20

#: Format characters of the fixed-size types of metadata by their number in the file.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
#: Before each text: its bytes.
_LENGTH = struct.Struct("<Q")

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the file: its name, shape, type by ggml's number, and byte offset in the data.

    `shape` has the fastest-moving dimension first, as in the file.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself before its tensor data.

    `metadata` has the scalars and texts by key. `lengths` has the number of elements of each array,
    whose values are not kept. `data_start` is the byte where the data of the tensors begins.
    """

    metadata: Mapping[str, Scalar]
    lengths: Mapping[str, int]
    tensors: tuple[TensorEntry, ...]
    data_start: int
    file_bytes: int


def read_header(file: Path) -> GgufHeader:
    """The header of a GGUF file.

    Raises:
        ModelRefused: the file cannot be read, is no GGUF file, is of another version, or ends
            before what its header lists.
    """
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            if size < len(MAGIC):
                raise ModelRefused(f"{file} is not a GGUF file: it has {size} bytes")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _header(mapped, file)
    except OSError as error:
        raise ModelRefused(f"{file} cannot be read: {error.strerror or error}") from error


def _header(mapped: mmap.mmap, file: Path) -> GgufHeader:
    if mapped[:4] != MAGIC:
        raise ModelRefused(f"{file} is not a GGUF file: it does not begin with the letters GGUF")
    reader = _Reader(mapped, file)
    version = reader.number("I")
    if version not in VERSIONS:
        if version & 0xFFFF == 0 and version:
            raise ModelRefused(f"{file} is a big-endian GGUF file; convert it to little-endian")
        raise ModelRefused(f"{file} is GGUF version {version}; versions 2 and 3 are served")
    num_tensors = reader.count("Q", MAX_TENSORS, "tensors")
    num_keys = reader.count("Q", MAX_KEYS, "metadata keys")
    metadata: dict[str, Scalar] = {}
    lengths: dict[str, int] = {}
    for _ in range(num_keys):
        _read_pair(reader, metadata, lengths)
    tensors = tuple(_read_tensor(reader) for _ in range(num_tensors))
    names = {tensor.name for tensor in tensors}
    if len(names) < len(tensors):
        raise ModelRefused(f"{file} is damaged: it lists a tensor twice")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelRefused(f"{file} is damaged: its alignment {alignment} is no power of two")
    start = -(-reader.offset // alignment) * alignment
    return GgufHeader(metadata, lengths, tensors, start, len(mapped))


def read_parts(file: Path) -> Mapping[Path, GgufHeader]:
    """The headers of a model's files, by their paths: of one, or of all parts of a split model.

    Args:
        file: the only file, or the first part, named as `llama-gguf-split` names it.

    Raises:
        ModelRefused: as `read_header`, for each part; or parts are missing or not of one model.
    """
    first = read_header(file)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return {file: first}
    if count > MAX_PARTS:
        raise ModelRefused(f"{file} lists {count} parts; at most {MAX_PARTS} are read")
    name = re.fullmatch(r"(.+)-00001-of-(\d{5})\.gguf", file.name, re.IGNORECASE)
    if first.metadata.get("split.no", 0) != 0 or name is None or int(name[2]) != count:
        raise ModelRefused(
            f"{file} is one of the {count} parts of a model; name the first one, whose name ends "
            f"with -00001-of-{count:05}.gguf, and keep the others beside it"
        )
    parts = {file: first}
    for number in range(1, count):
        part = file.with_name(f"{name[1]}-{number + 1:05}-of-{name[2]}{file.suffix}")
        if not part.is_file():
            raise ModelRefused(f"{file} has {count} parts, and {part.name} is not beside it")
        parts[part] = header = read_header(part)
        if (header.metadata.get("split.no"), header.metadata.get("split.count")) != (number, count):
            raise ModelRefused(f"{part} is not part {number + 1} of {count} of a model")
    found = [tensor.name for header in parts.values() for tensor in header.tensors]
    if len(set(found)) < len(found):
        raise ModelRefused(f"{file} is damaged: its parts list a tensor twice")
    if first.metadata.get("split.tensors.count", len(found)) != len(found):
        raise ModelRefused(f"the parts of {file} do not have as many tensors as the first one says")
    return parts


def check_extents(header: GgufHeader, file: Path, blocks: Mapping[int, tuple[int, int]]) -> None:
    """ModelRefused if the data of a tensor would lie outside the file or in that of another one.

    Args:
        header: what the file lists.
        file: its name, for the message.
        blocks: elements and bytes of one block, by ggml's number of the type. Every type of the
            file must be in it.
    """
    extents = []
    for tensor in header.tensors:
        elements, size = blocks[tensor.ggml_type]
        if tensor.shape[0] % elements:
            raise ModelRefused(
                f"{file} is damaged: rows of {tensor.name} have {tensor.shape[0]} elements, and "
                f"its type has blocks of {elements}"
            )
        end = header.data_start + tensor.offset + prod(tensor.shape) // elements * size
        if end > header.file_bytes:
            raise ModelRefused(
                f"{file} is truncated: {tensor.name} ends at byte {end}, and the file has "
                f"{header.file_bytes} bytes; copy or download it again"
            )
        extents.append((header.data_start + tensor.offset, end, tensor.name))
    # Tensors that share bytes would take many times the size of the file in memory.
    extents.sort()
    for (_, end, name), (begin, _, other) in pairwise(extents):
        if begin < end:
            raise ModelRefused(f"{file} is damaged: its tensors {name} and {other} overlap")


def _read_pair(reader: "_Reader", metadata: dict[str, Scalar], lengths: dict[str, int]) -> None:
    key = reader.name()
    if key in metadata or key in lengths:
        raise reader.damaged(f"the metadata key {key} occurs twice")
    kind = reader.number("I")
    if kind in _SCALARS:
        metadata[key] = reader.scalar(_SCALARS[kind])
    elif kind == _STRING:
        text = reader.text()
        if text is not None:
            metadata[key] = text
    elif kind == _ARRAY:
        lengths[key] = _skip_array(reader, key, MAX_ARRAY_LENGTH - sum(lengths.values()))
    else:
        raise reader.damaged(f"the metadata key {key} has the unknown type {kind}")


def _skip_array(reader: "_Reader", key: str, most: int) -> int:
    kind = reader.number("I")
    length = reader.count("Q", most, f"elements of {key}")
    if kind in _SCALARS:
        reader.skip(length * struct.calcsize(_SCALARS[kind]))
    elif kind == _STRING:
        reader.skip_texts(length)
    else:
        raise reader.damaged(f"the metadata key {key} is an array of the unknown type {kind}")
    return length


def _read_tensor(reader: "_Reader") -> TensorEntry:
    name = reader.name()
    num_dimensions = reader.count("I", MAX_DIMENSIONS, f"dimensions of {name}")
    shape = tuple(reader.number("Q") for _ in range(num_dimensions))
    if not shape or not all(shape):
        raise reader.damaged(f"the tensor {name} has no elements")
    return TensorEntry(name, shape, reader.number("I"), reader.number("Q"))


class _Reader:
    """Reads values one after the other, and never past the end of the file or of the limit."""

    def __init__(self, mapped: mmap.mmap, file: Path) -> None:
        self._mapped, self._file = mapped, file
        self._end = min(len(mapped), MAX_HEADER_BYTES)
        self.offset = len(MAGIC)

    def damaged(self, what: str) -> ModelRefused:
        return ModelRefused(f"{self._file} is damaged: {what}")

    def skip(self, num_bytes: int) -> int:
        """Move past so many bytes, and return where they begin."""
        begin, end = self.offset, self.offset + num_bytes
        if end > self._end:
            if end <= len(self._mapped):
                limit = MAX_HEADER_BYTES >> 20
                raise ModelRefused(f"the header of {self._file} has more than {limit} MiB")
            raise ModelRefused(
                f"{self._file} ends inside its header, or its header is damaged; copy or download "
                "it again"
            )
        self.offset = end
        return begin

    def skip_texts(self, count: int) -> None:
        """Move past texts. A vocabulary has so many that a call for each would take long."""
        end = self.offset
        for _ in range(count):
            if end + _LENGTH.size > self._end:
                self.skip(end + _LENGTH.size - self.offset)
            end += _LENGTH.size + _LENGTH.unpack_from(self._mapped, end)[0]
        self.skip(end - self.offset)

    def scalar(self, form: str) -> int | float | bool:
        begin = self.skip(struct.calcsize(form))
        value: int | float | bool = struct.unpack_from(f"<{form}", self._mapped, begin)[0]
        return value

    def number(self, form: str) -> int:
        return int(self.scalar(form))

    def count(self, form: str, limit: int, what: str) -> int:
        count = self.number(form)
        if count > limit:
            raise self.damaged(f"it lists {count} {what}; at most {limit} are read")
        return count

    def name(self) -> str:
        length = self.count("Q", MAX_NAME_BYTES, "bytes of a name")
        return self._decoded(self.skip(length), length)

    def text(self) -> str | None:
        """A text; None if it is longer than what is kept."""
        length = self.number("Q")
        begin = self.skip(length)
        return self._decoded(begin, length) if length <= MAX_TEXT_BYTES else None

    def _decoded(self, begin: int, length: int) -> str:
        try:
            return self._mapped[begin : begin + length].decode()
        except UnicodeDecodeError as error:
            raise self.damaged("a text in its header is not UTF-8") from error
