"""Packs and unpacks msgpack within limits; only this module calls the codec.

Bytes from Redis are never trusted: for any bytes `unpack` returns plain Python values or raises
ProtocolError. It accepts no extension types, no keys other than strings and bytes, no pickle.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import msgpack

from quire.errors import InvalidRequest, ProtocolError

#: The largest encoded message, in bytes. A prompt of 128k token ids fits in it.
MAX_MESSAGE_BYTES = 1 << 20

#: The most elements of one array, and so the most token ids of one prompt.
MAX_ARRAY_LENGTH = 1 << 18

#: The most keys of one map.
MAX_MAP_LENGTH = 1024

#: The largest token id; every known vocabulary is far below it.
MAX_TOKEN_ID = (1 << 31) - 1

#: The deepest level of maps and lists at which an error names its path.
MAX_PATH_LENGTH = 16


#: The types of a value that has nothing inside it.
_PLAIN_TYPES = frozenset({str, int, float, bool, bytes, type(None)})

_Record = TypeVar("_Record")
_log = logging.getLogger(__name__)


class Unsendable(InvalidRequest):
    """A value that cannot be encoded. `path` is its path within the value that was packed."""

    def __init__(self, field: str, path: str, message: str) -> None:
        super().__init__(".".join(filter(None, (field, path))), message)
        self.path = path


def pack(value: object, *, field: str = "message", max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Encodes a caller's value.

    InvalidRequest(field) when it is larger than `max_bytes`, Unsendable when a part cannot be sent.
    """
    try:
        data: bytes = msgpack.packb(value, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise unsendable(value, field=field) from error
    if len(data) > max_bytes:
        raise InvalidRequest(field, f"takes {len(data)} bytes, the limit is {max_bytes}")
    return data


def unsendable(value: object, *, field: str) -> Unsendable:
    """The error for a value that cannot be sent; it names the innermost part at fault."""
    path, message = list[str](), _why_unsendable(value) or "cannot be sent"
    while len(path) < MAX_PATH_LENGTH:
        found = _part_at_fault(value)
        if found is None:
            break
        name, value, message = found
        path.append(str(name))
    return Unsendable(field, ".".join(path), message)


def unpack(data: bytes) -> Any:
    """Decodes one message. ProtocolError for anything malformed, foreign or over a limit."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message takes {len(data)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    try:
        return _decoded(data)
    except ProtocolError:
        raise
    # The codec raises a dozen types, among them plain ValueErrors and RecursionError.
    except Exception as error:
        raise ProtocolError(f"not a msgpack message: {type(error).__name__}: {error}") from error


def unpack_map(data: bytes) -> dict[str, Any]:
    """Like `unpack`, for a message that must be a map with string keys."""
    value = unpack(data)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ProtocolError("message is not a map with string keys")
    return value


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Encodes token ids as a msgpack array."""
    data: bytes = msgpack.packb(list(token_ids))
    return data


def pack_own(value: object) -> bytes:
    """Encodes a value of our own, with floats in single precision."""
    data: bytes = msgpack.packb(value, use_single_float=True)
    return data


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """Decodes an array of token ids. ProtocolError when it holds anything else."""
    value = unpack(data)
    if not is_token_ids(value):
        raise ProtocolError("message is not an array of token ids")
    return tuple(value)


def is_token_ids(value: object) -> bool:
    """Whether `value` is a list of token ids. A bool is not a token id although it is an int."""
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in value
    )


def readable(read: Callable[[Any, Any], _Record], rows: Iterable[tuple[Any, Any]]) -> list[_Record]:
    """What can be read of the rows; one that is not ours must not hide those that are."""
    found = []
    for row in rows:
        try:
            found.append(read(*row))
        except ProtocolError as error:
            _log.warning("left out: %s", error)
    return found


def without_numpy(value: Any) -> Any:
    """The value with the numbers and arrays of NumPy as Python's own, also in its lists and maps.

    The same for whatever has their `dtype` and `tolist`, such as a tensor or a column of pandas.
    """
    try:
        return _without_numpy(value)
    except RecursionError:
        # It contains itself; the check of its field refuses it by name.
        return value


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """ProtocolError in place of what Python raises when `what` is read and is not ours."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"{what} is damaged: {error!r}") from error


def _without_numpy(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return value
    if kind is dict:
        return {_without_numpy(key): _without_numpy(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        if _PLAIN_TYPES.issuperset(map(type, value)):
            return value
        return kind(map(_without_numpy, value))
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return value.tolist()
    return value


def _decoded(data: bytes) -> Any:
    return msgpack.unpackb(
        data,
        raw=False,
        strict_map_key=True,
        ext_hook=_refuse_extension,
        max_str_len=MAX_MESSAGE_BYTES,
        max_bin_len=MAX_MESSAGE_BYTES,
        max_array_len=MAX_ARRAY_LENGTH,
        max_map_len=MAX_MAP_LENGTH,
        max_ext_len=0,
    )


def _why_unsendable(value: object) -> str | None:
    """Why a value cannot be encoded and decoded again; None if it can."""
    try:
        _decoded(msgpack.packb(value, use_bin_type=True))
    except UnicodeEncodeError:
        return "holds half a surrogate pair, which no UTF-8 text can hold"
    except OverflowError:
        return "holds an integer that does not fit into 64 bits"
    # The codec raises a dozen types, among them plain ValueErrors and RecursionError.
    except Exception as error:  # noqa: BLE001
        return f"cannot be sent: {error}"
    return None


def _part_at_fault(value: object) -> tuple[object, object, str] | None:
    """Name, value and fault of a part that cannot be sent; None if each part alone can be sent.

    Searches by halves and not one by one: there may be hundreds of thousands of parts.
    """
    if isinstance(value, dict):
        parts = list[tuple[object, object]](value.items())
    elif isinstance(value, list | tuple):
        parts = list(enumerate(value))
    else:
        return None
    while len(parts) > 1:
        half = parts[: len(parts) // 2]
        other = parts[len(parts) // 2 :]
        if _why_unsendable([one for _, one in half]) is not None:
            parts = half
        elif _why_unsendable([one for _, one in other]) is not None:
            parts = other
        else:
            return None
    for name, part in parts:
        message = _why_unsendable(part)
        if message is not None:
            return name, part, message
    return None


def _refuse_extension(code: int, _data: bytes) -> NoReturn:
    raise ProtocolError(f"extension type {code} is not part of the protocol")
