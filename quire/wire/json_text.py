"""Reads JSON from a caller strictly, and names the path of the first fault.

Python's reader accepts NaN and Infinity, which JSON does not have. If a name comes twice in an
object, it silently keeps the last value. Both are faults here, and so are numbers beyond the range
of floats, and integers of very many digits. All other integers are exact.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from quire.errors import InvalidRequest

#: The most digits of an integer; the same as Python's own limit, as converting takes time in
#: proportion to the square of their number.
MAX_DIGITS = 4300

_TWICE = "comes twice in its object"
_NOT_FINITE = "must be a finite number: JSON has no NaN and no Infinity"
_TOO_LONG = f"must have at most {MAX_DIGITS} digits"


class Fault(NamedTuple):
    """What is wrong, and the path of the value from the outermost object, such as `a.0.b`."""

    path: str
    message: str


def read_object(text: str | bytes) -> tuple[dict[str, Any], Fault | None]:
    """Reads the object in `text`, and the first fault in it, or None.

    InvalidRequest for the field `body` if it is not JSON, or not an object.
    """
    reading = _Reading()
    try:
        try:
            value = reading.value_of(text)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise
        except ValueError:
            # An integer has too many digits. `parse_int` is slow, so it is used only then.
            reading = _Reading()
            value = reading.value_of(text, parse_int=reading.integer)
    # Too deep nesting raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("body", f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("body", "is not an object")
    return value, reading.fault_in(value)


class _Reading:
    """Reads one text, and notes what JSON or Quire does not allow in it."""

    def __init__(self) -> None:
        #: Objects with a name that comes twice, and that name.
        self._repeated: list[tuple[dict[str, Any], str]] = []
        #: The first number that cannot be used, which stands for it in the value, and why.
        self._unusable: tuple[float, str] | None = None

    def value_of(
        self, text: str | bytes, *, parse_int: Callable[[str], float] | None = None
    ) -> Any:
        """The value of the text. ValueError or RecursionError if there is none."""
        return json.loads(
            text,
            object_pairs_hook=self._object,
            parse_int=parse_int,
            parse_float=self._number,
            parse_constant=self._number,
        )

    def integer(self, text: str) -> float:
        """An integer; NaN if it has too many digits."""
        return int(text) if len(text.lstrip("-")) <= MAX_DIGITS else self._nan(_TOO_LONG)

    def fault_in(self, value: dict[str, Any]) -> Fault | None:
        """The first fault in the value that was read."""
        if self._repeated:
            owner, name = self._repeated[-1]
            path = _path_of(value, lambda one: one is owner)
            return Fault(f"{path}.{name}" if path else name, _TWICE)
        if self._unusable is not None:
            number, message = self._unusable
            return Fault(_path_of(value, lambda one: one is number), message)
        return None

    def _object(self, found: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(found)
        if len(value) < len(found):
            counts = Counter(name for name, _ in found)
            self._repeated.append((value, next(name for name in counts if counts[name] > 1)))
        return value

    def _number(self, text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else self._nan(_NOT_FINITE)

    def _nan(self, message: str) -> float:
        number = float("nan")
        self._unusable = self._unusable or (number, message)
        return number


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
