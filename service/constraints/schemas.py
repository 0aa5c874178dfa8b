"""Reads a JSON schema before the library does: rewrites or refuses what it would not enforce.

Knows no tokens. A keyword that asks nothing is left out, as `uniqueItems: false`; a `oneOf` whose
branches exclude one another becomes an `anyOf`; numbers and patterns that the library enforces by
half are narrowed. Every other keyword that cannot be enforced is refused with its place.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from decimal import Decimal
from typing import Any, Final, TypeAlias

from service.constraints.disjoint import first_overlap, resolved
from service.constraints.patterns import NO_ESCAPES, lets_escapes_in

Schema: TypeAlias = dict[str, Any]

#: Where a keyword has one schema, a list of them, or a map of them.
ONE = frozenset({"items", "additionalProperties"})
MANY = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
NAMED = frozenset({"properties", "patternProperties"})
#: What the library enforces beside these. A keyword that is neither here nor among those that it
#: cannot enforce asks nothing, by the rules of JSON Schema.
PLAIN = frozenset(
    {
        *("type", "const", "enum", "required", "pattern", "format", "multipleOf"),
        *("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)
#: Keywords that cannot be enforced, and which values of them ask nothing.
_NOTHING: Final[dict[str, tuple[object, ...]]] = {
    "not": (False,),
    "if": (),
    "contains": (),
    "uniqueItems": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
#: Keywords that say something only beside another one.
_NEEDS = {"if": ("then", "else")}
#: Formats that the library enforces; of the others, some describe a text and restrict nothing.
FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uuid", "uri", "unknown"),
    }
)
DESCRIBING_FORMATS = frozenset(["password", "binary", "path", "file-path", "directory-path"])
TYPES = frozenset(["null", "boolean", "number", "integer", "string", "array", "object"])
#: The most branches of a `oneOf`, each of which is compared with each other.
MAX_BRANCHES = 128
#: Numbers from here on lose digits in the library, which has them in double precision.
MAX_NUMBER = 1 << 53
#: How near to an exclusive bound a number may be that is no whole number, as a power of ten: the
#: library would take the bound itself in, so it is told a bound that is inclusive.
NEAREST = -9


class SchemaRefused(ValueError):
    """A schema that cannot be enforced: one sentence with the keyword and its JSON pointer."""


def reworked(schema: Mapping[str, Any]) -> Schema:
    """A schema that the library enforces, and that allows nothing more than the given one.

    Raises:
        SchemaRefused: there is none.
    """
    return _Reading(schema).result()


class _Reading:
    """One schema while it is rewritten, each part that it refers to once."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._given = schema
        self._done: dict[str, Any] = {}
        self._due: list[str] = []

    def result(self) -> Schema:
        root = self._schema(self._given, "")
        while self._due:
            pointer = self._due.pop()
            if pointer not in self._done:
                self._done[pointer] = True
                self._done[pointer] = self._schema(resolved(self._given, f"#{pointer}"), pointer)
        if not isinstance(root, dict):
            return {"allOf": [root]}
        if self._done:
            root["$defs"] = {_name_of(pointer): one for pointer, one in self._done.items()}
        return root

    def _schema(self, given: object, at: str) -> Any:
        if isinstance(given, bool):
            return given
        if not isinstance(given, Mapping):
            raise SchemaRefused(f"the schema at {_place(at)} must be a map, true or false")
        found: Schema = {}
        current = _current(given)
        for name, value in current.items():
            self._keyword(name, value, at=at, found=found, beside=current)
        _narrow_numbers(found, at)
        if "pattern" in found and lets_escapes_in(found["pattern"]):
            found.setdefault("allOf", []).append({"pattern": NO_ESCAPES})
        return found

    def _keyword(
        self, name: str, value: Any, *, at: str, found: Schema, beside: Mapping[str, Any]
    ) -> None:
        """Take one keyword of a schema into what is `found`."""
        place = f"{at}/{name}"
        if name in _NOTHING:
            if not _asks_nothing(name, value, beside):
                raise SchemaRefused(f"`{name}` at {_place(place)} cannot be enforced")
        elif name in PLAIN:
            _CHECKS.get(name, _accept)(name, value, place)
            if name != "format" or value not in DESCRIBING_FORMATS:
                found[name] = deepcopy(value)
        elif name == "$ref":
            found[name] = self._reference(value, place)
        elif name in ONE:
            found[name] = self._schema(value, place)
        elif name in NAMED:
            found[name] = self._map(value, place, are_patterns=name == "patternProperties")
        elif name in MANY:
            self._branches(name, self._list(value, place), place=place, found=found, beside=beside)

    def _branches(
        self,
        name: str,
        branches: list[Any],
        *,
        place: str,
        found: Schema,
        beside: Mapping[str, Any],
    ) -> None:
        if name == "oneOf":
            self._refuse_overlap(beside[name], place)
            # The library would join two of one name.
            name = "allOf" if "anyOf" in beside else "anyOf"
            branches = [{"anyOf": branches}] if "anyOf" in beside else branches
        if name == "allOf":
            branches = [*found.get(name, []), *branches]
        if branches:
            found[name] = branches

    def _reference(self, value: object, place: str) -> str:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            sentence = "must be a place in the schema itself, as `#/$defs/name`"
            raise SchemaRefused(f"`$ref` at {_place(place)} {sentence}")
        if resolved(self._given, value) is None:
            raise SchemaRefused(f"`$ref` at {_place(place)} refers to nothing in the schema")
        self._due.append(value[1:])
        return f"#/$defs/{_name_of(value[1:])}"

    def _list(self, value: object, place: str) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise SchemaRefused(f"the value at {_place(place)} must be a list of schemas")
        return [self._schema(one, f"{place}/{index}") for index, one in enumerate(value)]

    def _map(self, value: object, place: str, *, are_patterns: bool) -> Schema:
        if not isinstance(value, Mapping):
            raise SchemaRefused(f"the value at {_place(place)} must be a map of schemas")
        for key in value if are_patterns else ():
            if lets_escapes_in(key):
                sentence = "has a pattern for keys that cannot be enforced"
                raise SchemaRefused(f"`patternProperties` at {_place(place)} {sentence}")
        return {key: self._schema(one, f"{place}/{_escaped(key)}") for key, one in value.items()}

    def _refuse_overlap(self, branches: list[Any], place: str) -> None:
        if len(branches) > MAX_BRANCHES:
            raise SchemaRefused(f"`oneOf` at {_place(place)} has more than {MAX_BRANCHES} branches")
        overlap = first_overlap(self._given, branches)
        if overlap is not None:
            first, second = overlap
            raise SchemaRefused(
                f"`oneOf` at {_place(place)} cannot be enforced, as one value may be in branches"
                f" {first} and {second}; use `anyOf`, or a required property with another `const`"
                " in each branch"
            )


def _current(given: Mapping[str, Any]) -> dict[str, Any]:
    """A schema in the words of the current draft: those of the older ones are translated."""
    found = dict(given)
    more = found.pop("additionalItems", True)
    if isinstance(found.get("items"), list | tuple):
        found["prefixItems"] = found["items"]
        found["items"] = more
    for name, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(found.get(name), bool):
            is_exclusive = found.pop(name)
            if is_exclusive and inclusive in found:
                found[name] = found.pop(inclusive)
    return found


def _asks_nothing(name: str, value: object, beside: Mapping[str, Any]) -> bool:
    if any(type(value) is type(one) and value == one for one in _NOTHING[name]):
        return True
    if name == "uniqueItems":
        return isinstance(beside.get("maxItems"), int) and beside["maxItems"] <= 1
    if name == "contains":
        return beside.get("minContains") == 0 and "maxContains" not in beside
    return name in _NEEDS and not any(other in beside for other in _NEEDS[name])


def _narrow_numbers(found: Schema, at: str) -> None:
    """Make exclusive bounds inclusive where the library would take the bound itself in.

    It does so at whole numbers, where the other bound is less than one away. As bounds of several
    schemas meet in the library, each such bound is changed that may be one of a fraction.
    """
    if found.get("type") == "integer":
        return
    for exclusive, inclusive, sign in (
        ("exclusiveMinimum", "minimum", 1),
        ("exclusiveMaximum", "maximum", -1),
    ):
        bound = found.get(exclusive)
        if bound is None or bound != int(bound) or bound * sign < 0:
            continue
        nearest = Decimal(int(bound)) + sign * Decimal(10) ** NEAREST
        if Decimal(repr(float(nearest))) != nearest:
            raise SchemaRefused(
                f"`{exclusive}` at {_place(at)}/{exclusive} is too large to be enforced for"
                " numbers with a fraction"
            )
        del found[exclusive]
        other = found.get(inclusive)
        is_nearer = other is None or sign * (float(nearest) - other) > 0
        found[inclusive] = float(nearest) if is_nearer else other


def _check_number(name: str, value: object, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SchemaRefused(f"`{name}` at {_place(place)} must be a number")
    if abs(value) > MAX_NUMBER:
        raise SchemaRefused(f"`{name}` at {_place(place)} must be between -2^53 and 2^53")
    if name == "multipleOf" and value <= 0:
        raise SchemaRefused(f"`{name}` at {_place(place)} must be more than 0")


def _check_count(name: str, value: object, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        sentence = "must be a whole number that is not negative"
        raise SchemaRefused(f"`{name}` at {_place(place)} {sentence}")


def _check_type(name: str, value: object, place: str) -> None:
    for one in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(one, str) or one not in TYPES:
            known = ", ".join(sorted(TYPES))
            raise SchemaRefused(f"`{name}` at {_place(place)} must be one or more of {known}")


def _check_text(name: str, value: object, place: str) -> None:
    if not isinstance(value, str):
        raise SchemaRefused(f"`{name}` at {_place(place)} must be a text")
    if name == "format" and value not in FORMATS | DESCRIBING_FORMATS:
        known = ", ".join(sorted(FORMATS - {"unknown"}))
        raise SchemaRefused(f"`format` at {_place(place)} cannot be enforced; these can: {known}")


def _check_constants(name: str, value: object, place: str) -> None:
    """Numbers lose digits in the library, also within maps and lists."""
    if name == "enum" and not isinstance(value, list | tuple):
        raise SchemaRefused(f"`enum` at {_place(place)} must be a list")
    due = [value]
    while due:
        one = due.pop()
        if isinstance(one, Mapping):
            due += one.values()
        elif isinstance(one, list | tuple):
            due += one
        elif isinstance(one, int | float) and not isinstance(one, bool) and abs(one) > MAX_NUMBER:
            sentence = "must have no number beyond 2^53"
            raise SchemaRefused(f"`{name}` at {_place(place)} {sentence}")


def _check_names(name: str, value: object, place: str) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise SchemaRefused(f"`{name}` at {_place(place)} must be a list of texts")


def _accept(name: str, value: object, place: str) -> None:
    pass


_CHECKS: Final[dict[str, Callable[[str, object, str], None]]] = {
    "type": _check_type,
    "const": _check_constants,
    "enum": _check_constants,
    "required": _check_names,
    "pattern": _check_text,
    "format": _check_text,
    **dict.fromkeys(
        ["minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"],
        _check_count,
    ),
    **dict.fromkeys(
        ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"], _check_number
    ),
}


def _place(pointer: str) -> str:
    return f"#{pointer}"


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _name_of(pointer: str) -> str:
    """The name that a place of the given schema has in the new one; no name of it needs escapes."""
    return "at" + "".join(one if one.isalnum() else f"_{ord(one):x}_" for one in pointer)
