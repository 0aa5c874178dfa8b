"""The schema of all values that another schema excludes. Knows no library.

It is made of keywords that can be enforced, and None if these cannot say it. Of the values that are
excluded by `integer`, numbers with a fraction are left out.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, Final

from service.worker.constraints.schemas.disjoint import overlaps
from service.worker.constraints.schemas.drafts import in_current_draft, listed
from service.worker.constraints.schemas.formats import keywords_of
from service.worker.constraints.schemas.whole import Whole

#: The most levels of schemas within schemas, and references in a row.
MAX_DEPTH = 16
#: The longest text that a pattern excludes: parentheses can be nested only so deep.
MAX_EXCLUDED_LENGTH = 100

_TYPES = ("null", "boolean", "number", "string", "array", "object")
#: What has more, or less, than a number of parts: for the keyword, the type, the keyword of the
#: others, and what is added to the number.
_COUNTS: Final[dict[str, tuple[str, str, int]]] = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
}
#: Keywords that restrict values, and whose complement cannot be said.
_UNSAYABLE = frozenset(
    {
        *("pattern", "format", "multipleOf", "items", "additionalProperties", "patternProperties"),
        *("propertyNames", "uniqueItems", "contains", "if", "dependentRequired"),
        *("dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
    }
)
#: Values of these that restrict nothing.
_FREE: Final[Mapping[str, Any]] = {
    "uniqueItems": False,
    "additionalProperties": True,
    "items": True,
}


class _Unsayable(Exception):
    """The complement cannot be said with these keywords, or would be too large."""


def complement(whole: Whole, schema: Any) -> Any:
    """A schema of the values that `schema` excludes; None if it is not known."""
    try:
        return _Negation(whole).of(schema, MAX_DEPTH)
    except _Unsayable:
        return None


class _Negation:
    """Makes one complement. Each method for a keyword returns the alternatives."""

    def __init__(self, whole: Whole) -> None:
        self._whole = whole

    def of(self, schema: Any, depth: int) -> Any:
        if isinstance(schema, bool):
            return not schema
        if depth == 0 or not isinstance(schema, Mapping) or not self._whole.may_go_on():
            raise _Unsayable
        found: list[Any] = []
        for name, value in in_current_draft(schema).items():
            if name in _COUNTS:
                found += _of_count(name, value)
            elif name in _RULES:
                found += _RULES[name](self, value, depth - 1)
            elif name in _UNSAYABLE and not _is_free(name, value):
                raise _Unsayable
        found = [one for one in found if one is not False]
        return {"anyOf": found} if len(found) > 1 else found[0] if found else False

    def _of_types(self, value: Any, _: int) -> list[Any]:
        given = listed(value)
        if "integer" in given:
            given = [*given, "number"]
        others = [one for one in _TYPES if one not in given]
        return [{"type": others}] if others else []

    def _of_values(self, value: Any, _: int) -> list[Any]:
        values = list(listed(value))
        if any(isinstance(one, Mapping | list | tuple) for one in values):
            raise _Unsayable
        texts = [one for one in values if isinstance(one, str)]
        numbers = sorted({one for one in values if type(one) in (int, float)})
        found: list[Any] = [{"type": ["array", "object", *([] if None in values else ["null"])]}]
        found += [
            {"const": one} for one in (True, False) if all(one is not each for each in values)
        ]
        pattern = {"pattern": f"^{_other_than(texts)}$"} if texts else {}
        found.append({"type": "string", **pattern})
        ends = [None, *numbers, None]
        for least, most in pairwise(ends):
            bounds = {"exclusiveMinimum": least, "exclusiveMaximum": most}
            given = {name: one for name, one in bounds.items() if one is not None}
            found.append({"type": "number", **given})
        return found

    def _of_required(self, value: Any, _: int) -> list[Any]:
        names = [_checked(one, str) for one in listed(value)]
        return [{"type": "object", "properties": {name: False}} for name in names]

    def _of_properties(self, value: Any, depth: int) -> list[Any]:
        parts = {name: self.of(one, depth) for name, one in _checked(value, Mapping).items()}
        return [
            {"type": "object", "required": [name], "properties": {name: one}}
            for name, one in parts.items()
            if one is not False
        ]

    def _of_first_items(self, value: Any, depth: int) -> list[Any]:
        parts = [self.of(one, depth) for one in _checked(value, list)]
        return [
            {"type": "array", "minItems": index + 1, "prefixItems": [True] * index + [one]}
            for index, one in enumerate(parts)
            if one is not False
        ]

    def _of_any(self, value: Any, depth: int) -> list[Any]:
        return [{"allOf": [self.of(one, depth) for one in _checked(value, list)]}]

    def _of_one(self, value: Any, depth: int) -> list[Any]:
        if any(True for _ in overlaps(self._whole, _checked(value, list))):
            raise _Unsayable
        return self._of_any(value, depth)

    def _of_all(self, value: Any, depth: int) -> list[Any]:
        return [self.of(one, depth) for one in _checked(value, list)]

    def _of_not(self, value: Any, _: int) -> list[Any]:
        return [value]

    def _of_reference(self, value: Any, depth: int) -> list[Any]:
        return [self.of(self._whole.resolve(_checked(value, str)), depth)]


_RULES: Final[dict[str, Callable[[_Negation, Any, int], list[Any]]]] = {
    "type": _Negation._of_types,
    "const": lambda self, value, depth: self._of_values([value], depth),
    "enum": _Negation._of_values,
    "required": _Negation._of_required,
    "properties": _Negation._of_properties,
    "prefixItems": _Negation._of_first_items,
    "anyOf": _Negation._of_any,
    "oneOf": _Negation._of_one,
    "allOf": _Negation._of_all,
    "not": _Negation._of_not,
    "$ref": _Negation._of_reference,
}


def _is_free(name: str, value: Any) -> bool:
    """Whether a keyword restricts nothing."""
    if name == "format":
        return isinstance(value, str) and keywords_of(value) == {}
    return name in _FREE and value in (_FREE[name], {})


def _of_count(name: str, value: Any) -> list[Any]:
    type_, other, more = _COUNTS[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Unsayable
    if name == "maxProperties" and value > 0:
        # More than one property cannot be counted.
        raise _Unsayable
    return [{"type": type_, other: value + more}] if value + more >= 0 or not more else []


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise _Unsayable
    return value


def _other_than(texts: Iterable[str]) -> str:
    """A regular expression of every text except these."""
    texts = set(texts)
    if any(len(one) > MAX_EXCLUDED_LENGTH for one in texts):
        raise _Unsayable
    follow: dict[str, set[str]] = {}
    for one in texts:
        follow.setdefault(one[:1], set()).add(one[1:])
    is_end = "" in texts
    follow.pop("", None)
    if not follow:
        return r"[\s\S]+" if is_end else r"[\s\S]*"
    other = rf"[^{''.join(map(_escaped, sorted(follow)))}][\s\S]*"
    begun = [f"{_escaped(first)}{_other_than(rest)}" for first, rest in sorted(follow.items())]
    return f"(?:{'|'.join([other, *begun])}){'' if is_end else '?'}"


def _escaped(character: str) -> str:
    return re.sub(r"[\\.^$|?*+(){}\[\]&~#/-]", r"\\\g<0>", character)
