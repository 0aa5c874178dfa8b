"""Rewrites or refuses the parts of a JSON schema that the library would not enforce.

Knows no tokens. Keywords without an effect are left out, such as `uniqueItems: false`. A `oneOf`
whose branches exclude each other becomes an `anyOf`. Numbers and patterns that the library enforces
only in part are narrowed. Every other keyword that cannot be enforced is refused with its JSON
pointer.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from decimal import Decimal
from typing import Any, Final, TypeAlias

from quire.wire.constraints import resolve
from service.constraints.disjoint import first_overlap
from service.constraints.equivalents import properties_of_names
from service.constraints.formats import keywords_of
from service.constraints.patterns import NO_ESCAPES, admits_escapes

Schema: TypeAlias = dict[str, Any]

#: Keywords whose value is one schema, a list of schemas, or a map of schemas.
ONE = frozenset({"items", "additionalProperties"})
MANY = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
NAMED = frozenset({"properties", "patternProperties"})
#: The other keywords that the library enforces. By the rules of JSON Schema, a keyword that is
#: neither here nor among those that cannot be enforced has no effect.
PLAIN = frozenset(
    {
        *("type", "const", "enum", "required", "pattern", "multipleOf"),
        *("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)
#: Keywords that cannot be enforced, with their values that have no effect.
_UNENFORCED: Final[dict[str, tuple[object, ...]]] = {
    "not": (False,),
    "if": (),
    "contains": (),
    "uniqueItems": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
#: Keywords that have an effect only together with one of these others.
_NEEDS = {"if": ("then", "else")}
TYPES = frozenset(["null", "boolean", "number", "integer", "string", "array", "object"])
#: The most branches of a `oneOf`: every pair of them is compared.
MAX_BRANCHES = 128
#: Larger numbers lose digits in the library, which stores them in double precision.
MAX_NUMBER = 1 << 53
#: The characters of a constant that the library leaves out: JSON_ESCAPES has no escape for them.
_LOST = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
#: An exclusive bound becomes an inclusive one that is 10 to this power away, because the library
#: would accept the bound itself. Numbers that are closer to the bound are lost.
NEAREST_EXPONENT = -9


class SchemaRefused(ValueError):
    """The schema cannot be enforced. The message is one sentence with keyword and JSON pointer."""


def enforceable(schema: Mapping[str, Any]) -> Schema:
    """A schema that the library enforces and that allows no value which the given one excludes.

    Raises:
        SchemaRefused: no such schema can be made.
    """
    return _Reading(schema).result()


class _Reading:
    """Rewrites one schema, and each part that it refers to once.

    A `pointer` is the JSON pointer of a part of the given schema, and "" is the schema itself.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        self._done: dict[str, Any] = {}
        self._due: list[str] = []

    def result(self) -> Schema:
        root = self._schema(self._root, "")
        while self._due:
            pointer = self._due.pop()
            if pointer not in self._done:
                self._done[pointer] = True
                self._done[pointer] = self._schema(resolve(self._root, f"#{pointer}"), pointer)
        if not isinstance(root, dict):
            return {"allOf": [root]}
        if self._done:
            root["$defs"] = {_definition_name(pointer): one for pointer, one in self._done.items()}
        return root

    def _schema(self, schema_given: object, pointer: str) -> Any:
        if isinstance(schema_given, bool):
            return schema_given
        if not isinstance(schema_given, Mapping):
            raise SchemaRefused(f"the schema at #{pointer} must be a map, true or false")
        rewritten: Schema = {}
        current = _in_current_draft(schema_given)
        for name, value in current.items():
            self._keyword(name, value, pointer=pointer, rewritten=rewritten, beside=current)
        _narrow_numbers(rewritten, pointer)
        if "pattern" in rewritten and admits_escapes(rewritten["pattern"]):
            rewritten.setdefault("allOf", []).append({"pattern": NO_ESCAPES})
        return rewritten

    def _keyword(
        self, name: str, value: Any, *, pointer: str, rewritten: Schema, beside: Mapping[str, Any]
    ) -> None:
        """Check one keyword and add it to `rewritten`; `beside` has the keywords next to it."""
        pointer = f"{pointer}/{name}"
        if name in _UNENFORCED:
            if not _is_harmless(name, value, beside):
                raise SchemaRefused(f"`{name}` at #{pointer} cannot be enforced")
        elif name in PLAIN:
            _CHECKS.get(name, _accept)(name, value, pointer)
            rewritten[name] = deepcopy(value)
        elif name == "format":
            self._format(value, pointer=pointer, rewritten=rewritten, beside=beside)
        elif name == "propertyNames":
            self._names(value, pointer=pointer, rewritten=rewritten, beside=beside)
        elif name == "$ref":
            rewritten[name] = self._reference(value, pointer)
        elif name in ONE:
            rewritten[name] = self._schema(value, pointer)
        elif name in NAMED:
            rewritten[name] = self._map(value, pointer, are_patterns=name == "patternProperties")
        elif name in MANY:
            self._branches(
                name,
                self._list(value, pointer),
                pointer=pointer,
                rewritten=rewritten,
                beside=beside,
            )

    def _format(
        self, value: object, *, pointer: str, rewritten: Schema, beside: Mapping[str, Any]
    ) -> None:
        _check_text("format", value, pointer)
        if "string" not in _listed(beside.get("type", "string")):
            return
        keywords = keywords_of(str(value))
        if keywords is None:
            raise SchemaRefused(f"`format` at #{pointer} cannot be enforced")
        if keywords:
            rewritten.setdefault("allOf", []).append(dict(keywords))

    def _names(
        self, value: object, *, pointer: str, rewritten: Schema, beside: Mapping[str, Any]
    ) -> None:
        has_patterns = bool(beside.get("patternProperties"))
        named = properties_of_names(self._root, value, has_patterns=has_patterns)
        if named is None:
            raise SchemaRefused(f"`propertyNames` at #{pointer} cannot be enforced")
        if named is not True:
            rewritten.setdefault("allOf", []).append(self._schema(named, pointer))

    def _branches(
        self,
        name: str,
        branches: list[Any],
        *,
        pointer: str,
        rewritten: Schema,
        beside: Mapping[str, Any],
    ) -> None:
        if name == "oneOf":
            self._refuse_overlap(beside[name], pointer)
            # A schema has only one `anyOf`, and it is taken.
            name = "allOf" if "anyOf" in beside else "anyOf"
            branches = [{"anyOf": branches}] if "anyOf" in beside else branches
        if name == "allOf":
            branches = [*rewritten.get(name, []), *branches]
        if branches:
            rewritten[name] = branches

    def _reference(self, value: object, pointer: str) -> str:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            sentence = "must point into the schema itself, as `#/$defs/name` does"
            raise SchemaRefused(f"`$ref` at #{pointer} {sentence}")
        if resolve(self._root, value) is None:
            raise SchemaRefused(f"`$ref` at #{pointer} refers to nothing in the schema")
        self._due.append(value[1:])
        return f"#/$defs/{_definition_name(value[1:])}"

    def _list(self, value: object, pointer: str) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise SchemaRefused(f"the value at #{pointer} must be a list of schemas")
        return [self._schema(one, f"{pointer}/{index}") for index, one in enumerate(value)]

    def _map(self, value: object, pointer: str, *, are_patterns: bool) -> Schema:
        if not isinstance(value, Mapping):
            raise SchemaRefused(f"the value at #{pointer} must be a map of schemas")
        for key in value if are_patterns else ():
            if admits_escapes(key):
                sentence = "has a pattern for keys that cannot be enforced"
                raise SchemaRefused(f"`patternProperties` at #{pointer} {sentence}")
        return {key: self._schema(one, f"{pointer}/{_escaped(key)}") for key, one in value.items()}

    def _refuse_overlap(self, branches: list[Any], pointer: str) -> None:
        if len(branches) > MAX_BRANCHES:
            raise SchemaRefused(f"`oneOf` at #{pointer} has more than {MAX_BRANCHES} branches")
        overlap = first_overlap(self._root, branches)
        if overlap is not None:
            first, second = overlap
            raise SchemaRefused(
                f"`oneOf` at #{pointer} cannot be enforced, because one value may match branches"
                f" {first} and {second}; use `anyOf`, or a required property with another `const`"
                " in each branch"
            )


def _in_current_draft(schema_given: Mapping[str, Any]) -> dict[str, Any]:
    """A schema in the current draft of JSON Schema; keywords of older drafts are translated."""
    rewritten = dict(schema_given)
    more = rewritten.pop("additionalItems", True)
    if isinstance(rewritten.get("items"), list | tuple):
        rewritten["prefixItems"] = rewritten["items"]
        rewritten["items"] = more
    for name, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(rewritten.get(name), bool):
            is_exclusive = rewritten.pop(name)
            if is_exclusive and inclusive in rewritten:
                rewritten[name] = rewritten.pop(inclusive)
    return rewritten


def _is_harmless(name: str, value: object, beside: Mapping[str, Any]) -> bool:
    if any(type(value) is type(one) and value == one for one in _UNENFORCED[name]):
        return True
    if name == "uniqueItems":
        return isinstance(beside.get("maxItems"), int) and beside["maxItems"] <= 1
    if name == "contains":
        return beside.get("minContains") == 0 and "maxContains" not in beside
    return name in _NEEDS and not any(other in beside for other in _NEEDS[name])


def _narrow_numbers(rewritten: Schema, pointer: str) -> None:
    """Make exclusive bounds inclusive where the library would accept the bound itself.

    It does so if the bound is a whole number and the other bound is less than one away. The library
    also combines bounds of several schemas, so the other bound is not known here. Therefore every
    such bound is changed, unless the type is `integer`.
    """
    if rewritten.get("type") == "integer":
        return
    for exclusive, inclusive, sign in (
        ("exclusiveMinimum", "minimum", 1),
        ("exclusiveMaximum", "maximum", -1),
    ):
        bound = rewritten.get(exclusive)
        if bound is None or bound != int(bound) or bound * sign < 0:
            continue
        nearest = Decimal(int(bound)) + sign * Decimal(10) ** NEAREST_EXPONENT
        if Decimal(repr(float(nearest))) != nearest:
            raise SchemaRefused(
                f"`{exclusive}` at #{pointer}/{exclusive} is too large to be enforced for"
                " numbers with a fraction"
            )
        del rewritten[exclusive]
        other = rewritten.get(inclusive)
        is_nearer = other is None or sign * (float(nearest) - other) > 0
        rewritten[inclusive] = float(nearest) if is_nearer else other


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
    for one in _listed(value):
        if not isinstance(one, str) or one not in TYPES:
            known = ", ".join(sorted(TYPES))
            raise SchemaRefused(f"`{name}` at #{pointer} must be one or more of {known}")


def _check_text(name: str, value: object, pointer: str) -> None:
    if not isinstance(value, str):
        raise SchemaRefused(f"`{name}` at #{pointer} must be a string")


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else [value]


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


def _accept(name: str, value: object, pointer: str) -> None:
    pass


_CHECKS: Final[dict[str, Callable[[str, object, str], None]]] = {
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


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _definition_name(pointer: str) -> str:
    """The name of a definition in the new schema for a JSON pointer into the given one.

    Such a name never needs escapes.
    """
    return "at" + "".join(one if one.isalnum() else f"_{ord(one):x}_" for one in pointer)
