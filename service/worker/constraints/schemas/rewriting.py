"""Rewrites or refuses the parts of a JSON schema that the library would not enforce.

Knows no tokens. Keywords without an effect are left out, such as `uniqueItems: false`. A `oneOf`
becomes an `anyOf` whose branches exclude each other; other keywords become those of `equivalents`.
Numbers and patterns that the library enforces only in part are narrowed. Every other keyword that
cannot be enforced is refused with its JSON pointer.
"""

from collections.abc import Mapping
from copy import deepcopy
from decimal import Decimal
from typing import Any, TypeAlias

from service.worker.constraints.schemas.checks import CHECKS, SchemaRefused
from service.worker.constraints.schemas.disjoint import overlaps
from service.worker.constraints.schemas.drafts import in_current_draft, texts_of
from service.worker.constraints.schemas.equivalents import EQUIVALENTS
from service.worker.constraints.schemas.formats import keywords_of
from service.worker.constraints.schemas.negation import complement
from service.worker.constraints.schemas.patterns import NO_ESCAPES, admits_escapes
from service.worker.constraints.schemas.whole import Whole

Schema: TypeAlias = dict[str, Any]

#: Keywords whose value is one schema, a list of schemas, or a map of schemas.
ONE = frozenset({"items", "additionalProperties"})
MANY = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
NAMED = frozenset({"properties", "patternProperties"})
#: All keywords that may restrict a value. By the rules of JSON Schema, no other one has an effect.
_RESTRICTING = frozenset({*CHECKS, *EQUIVALENTS, *ONE, *MANY, *NAMED, "$ref"})
#: The most branches of a `oneOf`: every pair of them is compared.
MAX_BRANCHES = 128
#: The most pairs of branches that overlap: each makes the schema larger.
MAX_OVERLAPS = 512
#: An exclusive bound becomes an inclusive one that is 10 to this power away, because the library
#: would accept the bound itself. Numbers that are closer to the bound are lost.
NEAREST_EXPONENT = -9


def enforceable(schema: Mapping[str, Any]) -> Schema:
    """A schema that the library enforces and that allows no value which the given one excludes.

    Raises:
        SchemaRefused: no such schema can be made.
    """
    return _Reading(schema).result()


def restricting(schema: Mapping[str, Any]) -> frozenset[str]:
    """The keywords of a schema that may restrict a value, without formats that restrict nothing."""
    found = _RESTRICTING & schema.keys()
    is_free = isinstance(schema.get("format"), str) and keywords_of(schema["format"]) == {}
    return found - {"format"} if is_free else found


class _Reading:
    """Rewrites one schema, and each part that it refers to once.

    A `pointer` is the JSON pointer of a part of the given schema, and "" is the schema itself.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        self._whole = Whole(schema)
        self._done: dict[str, Any] = {}
        self._due: list[str] = []

    def result(self) -> Schema:
        root = self._schema(self._root, "")
        while self._due:
            pointer = self._due.pop()
            if pointer not in self._done:
                self._done[pointer] = True
                self._done[pointer] = self._schema(self._whole.resolve(f"#{pointer}"), pointer)
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
        current = in_current_draft(schema_given)
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
        if name in CHECKS:
            CHECKS[name](name, value, pointer)
            if name == "minProperties":
                self._least(value, pointer=pointer, rewritten=rewritten, beside=beside)
            else:
                rewritten[name] = deepcopy(value)
        elif name in EQUIVALENTS:
            found = EQUIVALENTS[name](self._whole, beside)
            if found is None:
                raise SchemaRefused(f"`{name}` at #{pointer} cannot be enforced")
            if found not in (True, {}):
                added = [*_in_order(beside), self._schema(found, pointer)]
                rewritten.setdefault("allOf", []).extend(added)
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

    def _least(
        self, value: int, *, pointer: str, rewritten: Schema, beside: Mapping[str, Any]
    ) -> None:
        """Add `minProperties`, as far as `required` does not imply it.

        The library lets a key that the schema does not name come twice, and counts both. So it can
        enforce one more than `required`, and not more. It refuses to count beside `properties` that
        may be missing, if others are allowed. Then the schema is split: one of these properties is
        there, or none of them is and the library counts the others.
        """
        required = set(texts_of(beside.get("required")))
        if value - len(required) > 1:
            raise SchemaRefused(f"`minProperties` at #{pointer} cannot be enforced")
        given = beside.get("properties")
        properties = given if isinstance(given, Mapping) else {}
        optional = [
            key for key, one in properties.items() if one is not False and key not in required
        ]
        # Without others the library counts. Beside `maxProperties` it refuses, and a split would
        # not change that.
        is_left_to_library = (
            "maxProperties" in beside or beside.get("additionalProperties") is False
        )
        if value > len(required) and optional and not is_left_to_library:
            others = {
                "properties": dict.fromkeys(optional, False),
                "required": sorted(required),
                "minProperties": value,
            }
            schema = {"anyOf": [*({"required": [key]} for key in optional), others]}
            rewritten.setdefault("allOf", []).append(self._schema(schema, pointer))
        elif value > len(required):
            rewritten["minProperties"] = value

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
            branches = self._exclusive(branches, pointer, beside=beside)
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
        if self._whole.resolve(value) is None:
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

    def _exclusive(
        self, rewritten: list[Any], pointer: str, *, beside: Mapping[str, Any]
    ) -> list[Any]:
        """The rewritten branches, each without the values of the others that overlap with it."""
        branches = beside["oneOf"]
        if len(branches) > MAX_BRANCHES:
            raise SchemaRefused(f"`oneOf` at #{pointer} has more than {MAX_BRANCHES} branches")
        parts: list[list[Any]] = [[one] for one in rewritten]
        excluded: dict[int, Any] = {}
        for number, pair in enumerate(overlaps(self._whole, branches)):
            if number == MAX_OVERLAPS:
                raise SchemaRefused(_overlap(pair, pointer))
            for index, other in (pair, reversed(pair)):
                if other not in excluded:
                    excluded[other] = complement(self._whole, branches[other])
                    if excluded[other] is None:
                        raise SchemaRefused(_overlap(pair, pointer))
                    excluded[other] = self._schema(excluded[other], pointer)
                parts[index] += [] if len(parts[index]) > 1 else _in_order(beside)
                parts[index].append(excluded[other])
        return [{"allOf": one} if len(one) > 1 else one[0] for one in parts]


def _overlap(pair: tuple[int, int], pointer: str) -> str:
    first, second = pair
    return (
        f"`oneOf` at #{pointer} cannot be enforced, because one value may match branches {first}"
        f" and {second}; use `anyOf`, or a required property with another `const` in each branch"
    )


def _in_order(beside: Mapping[str, Any]) -> list[Schema]:
    """A schema for the order of the caller's properties, to stand before one that names some.

    Properties come in the order in which the library first reads their names.
    """
    properties = beside.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return []
    return [{"properties": dict.fromkeys(properties, True)}]


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


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _definition_name(pointer: str) -> str:
    """The name of a definition in the new schema for a JSON pointer into the given one.

    Such a name never needs escapes.
    """
    return "at" + "".join(one if one.isalnum() else f"_{ord(one):x}_" for one in pointer)
