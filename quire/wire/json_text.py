"""Reads JSON from a caller strictly, and names the path of the first fault.

Python's reader accepts NaN and Infinity, which JSON does not have. If a name comes twice in an
object, it silently keeps the last value. Both are faults here.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from quire.errors import InvalidRequest

#: The most digits of an integer that is converted; the same as Python's own limit. No field
#: accepts an integer of more than 20 digits. A longer one is read as TOO_LARGE, so that its field
#: refuses it by name.
MAX_DIGITS = 4300
TOO_LARGE = 1 << 64


class Fault(NamedTuple):
    """What is wrong, and the path of the value from the outermost object, such as `a.0.b`."""

    path: str
    message: str


def read_object(text: str | bytes) -> tuple[dict[str, Any], Fault | None]:
    """Reads the object in `text`, and the first fault in it, or None.

    InvalidRequest for the field `body` if it is not JSON, or not an object.
    """
    repeated: list[tuple[dict[str, Any], str]] = []
    is_finite = True

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(found)
        if len(value) < len(found):
            counts = Counter(name for name, _ in found)
            repeated.append((value, next(name for name in counts if counts[name] > 1)))
        return value

    def number(text: str) -> float:
        nonlocal is_finite
        value = float(text)
        is_finite = is_finite and math.isfinite(value)
        return value

    read = {"object_pairs_hook": pairs, "parse_float": number, "parse_constant": number}
    value = _loaded(text, read)
    if not isinstance(value, dict):
        raise InvalidRequest("body", "is not an object")
    if repeated:
        owner, name = repeated[-1]
        path = _path_of(value, lambda one: one is owner)
        return value, Fault(f"{path}.{name}" if path else name, "comes twice in its object")
    if not is_finite:
        path = _path_of(value, lambda one: isinstance(one, float) and not math.isfinite(one))
        return value, Fault(path, "must be a finite number: JSON has no NaN and no Infinity")
    return value, None


def _loaded(text: str | bytes, read: dict[str, Any]) -> Any:
    try:
        try:
            return json.loads(text, **read)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise
        except ValueError:
            # An integer has too many digits. `parse_int` is slow, so it is used only then.
            return json.loads(text, parse_int=_integer, **read)
    # Too deep nesting raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("body", f"is not JSON: {error}") from error


def _integer(text: str) -> int:
    return int(text) if len(text) <= MAX_DIGITS else TOO_LARGE


def _path_of(value: Any, matches: Callable[[Any], bool]) -> str:
    """The path of the first value that matches.

    Not recursive, because the depth comes from the caller. Holds one place for each level and no
    path but the one that it returns: a name of a megabyte may have a million values below it.
    """
    if matches(value):
        return ""
    names: list[Any] = []
    levels = [_children(value)]
    while levels:
        for name, one in levels[-1]:
            if matches(one):
                return ".".join(map(str, (*names, name)))
            if type(one) in (dict, list):
                names.append(name)
                levels.append(_children(one))
                break
        else:
            levels.pop()
            del names[-1:]
    raise AssertionError("the reader saw this value, so a path must exist")


def _children(value: dict[str, Any] | list[Any]) -> Iterator[tuple[Any, Any]]:
    return iter(value.items()) if isinstance(value, dict) else enumerate(value)
