"""Whether two JSON schemas exclude each other, by a sound but incomplete test. Knows no library.

If the answer is yes, no value matches both. If it is no, there may still be no such value.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from quire.wire.constraints import resolve

#: The most levels of schemas within schemas that are compared.
MAX_DEPTH = 8

_ALL_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


def overlaps(root: Mapping[str, Any], branches: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Each two branches that one value may match."""
    for (first, one), (second, other) in combinations(enumerate(branches), 2):
        if not _exclude(root, one, other, depth=MAX_DEPTH):
            yield first, second


def _exclude(root: Mapping[str, Any], one: Any, other: Any, *, depth: int) -> bool:
    if one is False or other is False:
        return True
    if depth == 0 or not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    if _any_part_excludes(root, one, other, depth=depth):
        return True
    if _any_part_excludes(root, other, one, depth=depth):
        return True
    if not _types(one) & _types(other):
        return True
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not values & others
    if _types(one) == _types(other) == {"object"}:
        return _exclude_by_property(root, one, other, depth=depth)
    return False


def _any_part_excludes(
    root: Mapping[str, Any], one: Mapping[str, Any], other: Any, *, depth: int
) -> bool:
    """Whether a schema that `one` implies, or each of its alternatives, excludes the other."""
    if any(_exclude(root, part, other, depth=depth - 1) for part in _conjuncts(root, one)):
        return True
    alternatives = [one.get(name) for name in ("anyOf", "oneOf")]
    return any(
        all(_exclude(root, each, other, depth=depth - 1) for each in branches)
        for branches in alternatives
        if isinstance(branches, list | tuple) and branches
    )


def _exclude_by_property(
    root: Mapping[str, Any], one: Mapping[str, Any], other: Mapping[str, Any], *, depth: int
) -> bool:
    """Whether a required property has schemas in both that exclude each other."""
    properties, others = one.get("properties", {}), other.get("properties", {})
    if not isinstance(properties, Mapping) or not isinstance(others, Mapping):
        return False
    required = {*_texts(one.get("required")), *_texts(other.get("required"))}
    return any(
        name in required and _exclude(root, value, others[name], depth=depth - 1)
        for name, value in properties.items()
        if name in others
    )


def _conjuncts(root: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that every value of this one also matches."""
    if isinstance(schema.get("$ref"), str):
        yield resolve(root, schema["$ref"])
    inner = schema.get("allOf")
    yield from inner if isinstance(inner, list | tuple) else ()


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types of the values that may match; `integer` counts as `number`."""
    values = _given_values(schema)
    if values is not None:
        return frozenset(map(_type_of, values))
    given = schema.get("type")
    named = [given] if isinstance(given, str) else _texts(given) or sorted(_ALL_TYPES)
    return frozenset("number" if name == "integer" else name for name in named)


def _texts(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list | tuple) else []


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """The only values that may match, as JSON that can be compared; None if it lists no values."""
    values = _given_values(schema)
    return None if values is None else {_canonical(value) for value in values}


def _given_values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return list(values) if isinstance(values, list | tuple) else None


def _canonical(value: Any) -> str:
    return json.dumps(_with_integers(value), sort_keys=True)


def _with_integers(value: Any) -> Any:
    """The value with 1 in place of 1.0, because these are the same number in JSON."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _with_integers(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_integers(one) for one in value]
    return value


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, int | float):
        return "number"
    return "object" if isinstance(value, Mapping) else "array"
