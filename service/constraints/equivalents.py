"""Writes keywords of JSON Schema that the library lacks as schemas of keywords that it has.

Each result allows exactly the values that the keyword allows. Knows no library.
"""

from collections.abc import Mapping
from typing import Any

from quire.wire.constraints import resolve

#: The most references in a row that are followed.
MAX_REFERENCES = 8

_ANNOTATIONS = frozenset({"title", "description", "$comment", "default", "examples", "deprecated"})


def properties_of_names(root: Mapping[str, Any], names: Any, *, has_patterns: bool) -> Any:
    """The schema of an object whose names match `names`; None if this is not known.

    `has_patterns`: there is `patternProperties` beside it. The library cannot intersect patterns.
    """
    left = _without_references(root, names)
    if left is None:
        return None
    types = left.pop("type", "string")
    if "string" not in (types if isinstance(types, list | tuple) else [types]):
        return None
    schemas: list[Any] = []
    for values in (left.pop("enum", None), [left.pop("const")] if "const" in left else None):
        if isinstance(values, list | tuple):
            listed = [one for one in values if isinstance(one, str)]
            schemas.append(_with(properties=dict.fromkeys(listed, True)))
    patterns = [left.pop("pattern")] if isinstance(left.get("pattern"), str) else []
    if left.keys() & {"minLength", "maxLength"}:
        least, most = left.pop("minLength", 0), left.pop("maxLength", "")
        if not _are_counts(least, most or 0):
            return None
        patterns.append(rf"^[\s\S]{{{least},{most}}}$")
    if left or len(patterns) + has_patterns > 1:
        return None
    schemas += [_with(patternProperties={one: True}) for one in patterns]
    return {"allOf": schemas} if schemas else True


def _without_references(root: Mapping[str, Any], schema: Any) -> dict[str, Any] | None:
    """The keywords of a schema, or of the one that it refers to, that are no annotations."""
    for _ in range(MAX_REFERENCES):
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            break
        found = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
        if found.keys() != {"$ref"} or not isinstance(found["$ref"], str):
            return found
        schema = resolve(root, found["$ref"])
    return None


def _are_counts(*values: object) -> bool:
    return all(type(one) is int and one >= 0 for one in values)


def _with(**properties: Any) -> dict[str, Any]:
    return {**properties, "additionalProperties": False}
