"""Whether two JSON schemas exclude each other, by a sound but incomplete test. Knows no library.

If the answer is yes, no value matches both. If it is no, there may still be no such value.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import inf
from typing import Any

from service.worker.constraints.schemas.drafts import texts_of
from service.worker.constraints.schemas.whole import Whole

#: The most levels of schemas within schemas that are compared.
MAX_DEPTH = 8

#: For each type, the bounds of a value.
_BOUNDS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "number": ("minimum", "maximum"),
}
_ALL_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


def overlaps(whole: Whole, branches: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Each two branches that one value may match."""
    for (first, one), (second, other) in combinations(enumerate(branches), 2):
        if not _exclude(whole, one, other, depth=MAX_DEPTH):
            yield first, second


def _exclude(whole: Whole, one: Any, other: Any, *, depth: int) -> bool:
    if one is False or other is False:
        return True
    if depth == 0 or not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    if not whole.may_go_on():
        return False
    if _any_part_excludes(whole, one, other, depth=depth):
        return True
    if _any_part_excludes(whole, other, one, depth=depth):
        return True
    types = _types(one) & _types(other)
    if not types:
        return True
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not values & others
    if _exclude_by_bounds(one, other, types) or _exclude_by_bounds(other, one, types):
        return True
    return types == {"object"} and _exclude_by_property(whole, one, other, depth=depth)


def _any_part_excludes(whole: Whole, one: Mapping[str, Any], other: Any, *, depth: int) -> bool:
    """Whether a schema that `one` implies, or each of its alternatives, excludes the other."""
    if any(_exclude(whole, part, other, depth=depth - 1) for part in _conjuncts(whole, one)):
        return True
    alternatives = [one.get(name) for name in ("anyOf", "oneOf")]
    return any(
        all(_exclude(whole, each, other, depth=depth - 1) for each in branches)
        for branches in alternatives
        if isinstance(branches, list | tuple) and branches
    )


def _exclude_by_property(
    whole: Whole, one: Mapping[str, Any], other: Mapping[str, Any], *, depth: int
) -> bool:
    """Whether a required property has schemas in both that exclude each other."""
    return any(
        _exclude(whole, _property(one, name), _property(other, name), depth=depth - 1)
        for name in {*texts_of(one.get("required")), *texts_of(other.get("required"))}
    )


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """The schema of a property, or True."""
    properties = schema.get("properties", {})
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)


def _exclude_by_bounds(
    one: Mapping[str, Any], other: Mapping[str, Any], types: frozenset[str]
) -> bool:
    """Whether all values of these types are too large for one of the schemas."""
    return any(
        _number(one.get(least)) > _number(other.get(most), missing=inf)
        for type_, (least, most) in _BOUNDS.items()
        if types == {type_}
    )


def _number(value: object, *, missing: float = -inf) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else missing  # type: ignore[arg-type]


def _conjuncts(whole: Whole, schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that every value of this one also matches."""
    if isinstance(schema.get("$ref"), str):
        yield whole.resolve(schema["$ref"])
    inner = schema.get("allOf")
    yield from inner if isinstance(inner, list | tuple) else ()


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types of the values that may match; `integer` counts as `number`."""
    values = _given_values(schema)
    if values is not None:
        return frozenset(map(_type_of, values))
    given = schema.get("type")
    named = [given] if isinstance(given, str) else texts_of(given) or sorted(_ALL_TYPES)
    return frozenset("number" if name == "integer" else name for name in named)


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
