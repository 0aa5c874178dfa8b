"""Checks the values of the keywords of a JSON schema that the library enforces itself.

Each check raises SchemaRefused with one sentence that has the keyword and its JSON pointer.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

from service.worker.constraints.schemas.drafts import listed

TYPES = frozenset(["null", "boolean", "number", "integer", "string", "array", "object"])
#: Larger numbers lose digits in the library, which stores them in double precision.
MAX_NUMBER = 1 << 53
#: The characters of a constant that the library leaves out: JSON_ESCAPES has no escape for them.
_LOST = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


class SchemaRefused(ValueError):
    """The schema cannot be enforced. The message is one sentence with keyword and JSON pointer."""


def _check_number(name: str, value: object, pointer: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SchemaRefused(f"`{name}` at #{pointer} must be a number")
    if abs(value) > MAX_NUMBER:
        raise SchemaRefused(f"`{name}` at #{pointer} must be between -2^53 and 2^53")
    if name == "multipleOf" and value <= 0:
        raise SchemaRefused(f"`{name}` at #{pointer} must be more than 0")


def _check_count(name: str, value: object, pointer: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        sentence = "must be a whole number that is not negative"
        raise SchemaRefused(f"`{name}` at #{pointer} {sentence}")


def _check_type(name: str, value: object, pointer: str) -> None:
    for one in listed(value):
        if not isinstance(one, str) or one not in TYPES:
            known = ", ".join(sorted(TYPES))
            raise SchemaRefused(f"`{name}` at #{pointer} must be one or more of {known}")


def _check_text(name: str, value: object, pointer: str) -> None:
    if not isinstance(value, str):
        raise SchemaRefused(f"`{name}` at #{pointer} must be a string")


def _check_constants(name: str, value: object, pointer: str) -> None:
    """Refuse numbers and texts of which the library would lose a part, in maps and lists too."""
    if name == "enum" and not isinstance(value, list | tuple):
        raise SchemaRefused(f"`enum` at #{pointer} must be a list")
    due = [value]
    while due:
        one = due.pop()
        if isinstance(one, Mapping):
            due += one.values()
        elif isinstance(one, list | tuple):
            due += one
        elif isinstance(one, int | float) and not isinstance(one, bool) and abs(one) > MAX_NUMBER:
            sentence = "must have no number beyond 2^53"
            raise SchemaRefused(f"`{name}` at #{pointer} {sentence}")
        elif isinstance(one, str) and _LOST.search(one):
            sentence = r"must have no control character besides \b, \t, \n, \f and \r"
            raise SchemaRefused(f"`{name}` at #{pointer} {sentence}")


def _check_names(name: str, value: object, pointer: str) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise SchemaRefused(f"`{name}` at #{pointer} must be a list of strings")


#: The check of each such keyword. By the rules of JSON Schema, a keyword that is not known has no
#: effect.
CHECKS: Final[dict[str, Callable[[str, object, str], None]]] = {
    "type": _check_type,
    "const": _check_constants,
    "enum": _check_constants,
    "required": _check_names,
    "pattern": _check_text,
    **dict.fromkeys(
        ["minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"],
        _check_count,
    ),
    **dict.fromkeys(
        ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"], _check_number
    ),
}
