"""Writes keywords of JSON Schema that the library lacks as schemas of keywords that it has.

Each result allows exactly the values that the keyword allows, except for what `formats` and
`negation` leave out. Knows no library.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from service.worker.constraints.schemas.drafts import listed
from service.worker.constraints.schemas.formats import keywords_of
from service.worker.constraints.schemas.negation import complement
from service.worker.constraints.schemas.whole import Whole

#: The most references in a row that are followed.
MAX_REFERENCES = 8

_ANNOTATIONS = frozenset({"title", "description", "$comment", "default", "examples", "deprecated"})


def _of_not(whole: Whole, beside: Mapping[str, Any]) -> Any:
    return complement(whole, beside["not"])


def _of_if(whole: Whole, beside: Mapping[str, Any]) -> Any:
    condition, then, other = beside["if"], beside.get("then", True), beside.get("else", True)
    if then is True and other is True:
        return True
    excluded = complement(whole, condition)
    if excluded is None:
        return None
    return {"anyOf": [{"allOf": [condition, then]}, {"allOf": [excluded, other]}]}


def _of_needs(needs: Any) -> Any:
    """A property needs other properties, or a schema of the whole object."""
    if not isinstance(needs, Mapping):
        return None
    schemas = [
        {
            "anyOf": [
                {"properties": {name: False}},
                {"required": one} if isinstance(one, list | tuple) else one,
            ]
        }
        for name, one in needs.items()
    ]
    return {"allOf": schemas} if schemas else True


def _of_names(whole: Whole, beside: Mapping[str, Any]) -> Any:
    """An object has only properties whose names match a schema."""
    left = _without_references(whole, beside["propertyNames"])
    if left is None:
        return None
    if "string" not in listed(left.pop("type", "string")):
        return None
    schemas: list[Any] = []
    for values in (left.pop("enum", None), [left.pop("const")] if "const" in left else None):
        if isinstance(values, list | tuple):
            texts = [one for one in values if isinstance(one, str)]
            schemas.append(_with(properties=dict.fromkeys(texts, True)))
    patterns = [left.pop("pattern")] if isinstance(left.get("pattern"), str) else []
    if left.keys() & {"minLength", "maxLength"}:
        least, most = left.pop("minLength", 0), left.pop("maxLength", "")
        if not _are_counts(least, most or 0):
            return None
        patterns.append(rf"^[\s\S]{{{least},{most}}}$")
    # The library cannot intersect patterns.
    if left or len(patterns) + bool(beside.get("patternProperties")) > 1:
        return None
    schemas += [_with(patternProperties={one: True}) for one in patterns]
    return {"allOf": schemas} if schemas else True


def _without_references(whole: Whole, schema: Any) -> dict[str, Any] | None:
    """The keywords of a schema, or of the one that it refers to, that are no annotations."""
    for _ in range(MAX_REFERENCES):
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            break
        found = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
        if found.keys() != {"$ref"} or not isinstance(found["$ref"], str):
            return found
        schema = whole.resolve(found["$ref"])
    return None


def _are_counts(*values: object) -> bool:
    return all(type(one) is int and one >= 0 for one in values)


def _with(**properties: Any) -> dict[str, Any]:
    return {**properties, "additionalProperties": False}


def _of_format(_: Whole, beside: Mapping[str, Any]) -> Any:
    if not isinstance(beside["format"], str):
        return None
    if "string" not in listed(beside.get("type", "string")):
        return {}
    return keywords_of(beside["format"], has_pattern="pattern" in beside)


def _of_unique(_: Whole, beside: Mapping[str, Any]) -> Any:
    most = beside.get("maxItems")
    return True if beside["uniqueItems"] is False or (type(most) is int and most <= 1) else None


def _of_contains(_: Whole, beside: Mapping[str, Any]) -> Any:
    return True if beside.get("minContains") == 0 and "maxContains" not in beside else None


def _unless_free(value: Any) -> Any:
    """The equivalent of a keyword that has none, unless its value restricts nothing."""
    return True if value is True or value == {} else None


#: For each keyword, the schema that replaces it; None if it is not known. The second argument is
#: the schema that has the keyword.
EQUIVALENTS: Final[dict[str, Callable[[Whole, Mapping[str, Any]], Any]]] = {
    "not": _of_not,
    "if": _of_if,
    "dependencies": lambda _, beside: _of_needs(beside["dependencies"]),
    "dependentRequired": lambda _, beside: _of_needs(beside["dependentRequired"]),
    "dependentSchemas": lambda _, beside: _of_needs(beside["dependentSchemas"]),
    "propertyNames": _of_names,
    "format": _of_format,
    "uniqueItems": _of_unique,
    "contains": _of_contains,
    "unevaluatedItems": lambda _, beside: _unless_free(beside["unevaluatedItems"]),
    "unevaluatedProperties": lambda _, beside: _unless_free(beside["unevaluatedProperties"]),
    **dict.fromkeys(["$dynamicRef", "$recursiveRef"], lambda *_: None),
}
