"""Reads JSON that a caller wrote, and names the place of what JSON does not allow or leaves open.

Python's reader takes more than JSON has (NaN, Infinity), and of a name that comes twice in an
object it keeps the last value without a word. Both are faults here.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from quire.errors import InvalidRequest

#: The most digits of an integer that are read as its value, as in Python's own limit. No field
#: takes an integer of more than 20 digits; a longer one becomes TOO_LARGE, so that its field can
#: refuse it.
MAX_DIGITS = 4300
TOO_LARGE = 1 << 64


class Fault(NamedTuple):
    """What is wrong, and the path of the value from the outermost object, such as `a.0.b`."""

    path: str
    message: str


def read_object(text: str | bytes) -> tuple[dict[str, Any], Fault | None]:
    """The object that is written there, and the first fault in it.

    InvalidRequest for the field `body` if it is no JSON, or another value.
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
            # An integer with too many digits. A function of ours for each would slow down all.
            return json.loads(text, parse_int=_integer, **read)
    # Nesting without end is an error of its own kind.
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("body", f"is not JSON: {error}") from error


def _integer(text: str) -> int:
    return int(text) if len(text) <= MAX_DIGITS else TOO_LARGE


def _path_of(value: Any, is_it: Callable[[Any], bool]) -> str:
    """The path of the first value that is the one; without a call for each level."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        path, one = waiting.pop()
        if is_it(one):
            return path
        begin = f"{path}." if path else ""
        waiting += reversed([(f"{begin}{name}", child) for name, child in _children(one)])
    raise AssertionError("the value was seen while it was read")


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)
