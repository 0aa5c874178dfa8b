"""The types of the arguments of functions, for formats that write arguments without quotes.

The value `12` between tags is a text if the function takes a text, and a number otherwise. The
types are one letter each, so that the record of a call can keep them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from quire.openai.tools.notation import WORDS, JsonNotation
from quire.wire.constraints import resolve

#: For each function and each of its arguments the types that it may have, a letter of LETTERS each.
ArgumentTypes: TypeAlias = Mapping[str, Mapping[str, str]]

#: The types of JSON Schema -> letters.
LETTERS: Mapping[str, str] = {
    "string": "s",
    "integer": "i",
    "number": "n",
    "boolean": "b",
    "null": "z",
    "object": "o",
    "array": "a",
}
TEXT = LETTERS["string"]
_HOLDING = LETTERS["object"] + LETTERS["array"]

#: Stands for all arguments that a function does not name. No argument has this name: readers strip
#: the names of arguments.
OTHERS = " "
#: References and unions are followed so deep.
MAX_DEPTH = 16

_UNIONS = ("anyOf", "oneOf")


def argument_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """The types of the arguments of these functions, in OpenAI's form, which have been checked.

    An argument is left out if its schema says nothing of types. OTHERS has the types of arguments
    that the function does not name, if it says any; an argument without a type is empty then.
    """
    functions = ((tool["function"]["name"], tool["function"].get("parameters")) for tool in tools)
    found = {name: _Reader(parameters or {}).arguments() for name, parameters in functions}
    return {name: types for name, types in found.items() if types}


def argument_types_from(kept: object) -> dict[str, dict[str, str]]:
    """Reads them back from a record; what is not of this form is left out."""
    if not isinstance(kept, Mapping):
        return {}
    return {
        str(name): {str(key): str(letters) for key, letters in types.items()}
        for name, types in kept.items()
        if isinstance(types, Mapping)
    }


def json_of(text: str, types: str | None) -> str:
    """The JSON text of a value that stands between tags; `types` is None if they are not known.

    A text that is JSON of one of the types stays as it is. If no string may come, so does any map
    or list, also if it is written as Python does. Everything else is a string.
    """
    written = text.strip()
    if types is None or TEXT in types:
        wanted, written = types, WORDS.get(written, written)
    else:
        wanted, written = types + _HOLDING, JsonNotation().feed(written)
    if types != TEXT:
        try:
            letters = _letters_of(_loaded(written))
        except (ValueError, RecursionError):
            letters = ""
        if letters and (wanted is None or any(one in wanted for one in letters)):
            return written
    return json.dumps(text, ensure_ascii=False)


def _loaded(text: str) -> object:
    """The value of a JSON text, for its type alone. ValueError, RecursionError."""
    # An integer may have more digits than Python converts, and JSON knows no NaN.
    return json.loads(text, parse_int=lambda _: 0, parse_constant=_refused)


def _refused(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


class _Reader:
    """Reads the types of the arguments of one function, whose parameters are `root`.

    Each reference is followed once at each depth: branches of unions may refer to each other, and
    the ways through them are too many to walk.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._found: dict[tuple[str, int], str] = {}

    def arguments(self) -> dict[str, str]:
        """The letters of all arguments."""
        named, others = self._declared()
        types = {name: _distinct(map(self.letters, schemas)) for name, schemas in named.items()}
        types.pop(OTHERS, None)
        of_others = _distinct(map(self.letters, others))
        if of_others:
            return {**types, OTHERS: of_others}
        return {name: letters for name, letters in types.items() if letters}

    def _declared(self) -> tuple[dict[str, list[object]], list[object]]:
        """The schemas of each argument, and those of all others, in all parts of the schema.

        Each part is read once, whatever refers to it.
        """
        named: dict[str, list[object]] = {}
        others: list[object] = []
        parts, seen = [self._root], set[int]()
        while parts:
            part = parts.pop()
            if not isinstance(part, Mapping) or id(part) in seen:
                continue
            seen.add(id(part))
            properties, reference = part.get("properties"), part.get("$ref")
            for name, schema in properties.items() if isinstance(properties, Mapping) else ():
                named.setdefault(str(name), []).append(schema)
            if "patternProperties" not in part:
                others.append(part.get("additionalProperties"))
            if isinstance(reference, str):
                parts.append(resolve(self._root, reference))
            for several in ("allOf", *_UNIONS):
                branches = part.get(several)
                parts += branches if isinstance(branches, list) else ()
        return named, others

    def letters(self, schema: object, *, depth: int = 0) -> str:
        """The letters of a schema, without repetition; empty if it says nothing of types."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return ""
        declared = schema.get("type")
        if isinstance(declared, str | list):
            names = [declared] if isinstance(declared, str) else declared
            return _distinct(LETTERS.get(name, "") for name in names if isinstance(name, str))
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            found = [_letters_of(one) for one in values] if isinstance(values, list) else []
            return _distinct(one[:1] or TEXT for one in found)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self._of_reference(reference, depth=depth + 1)
        for union in _UNIONS:
            branches = schema.get(union)
            if isinstance(branches, list):
                return self._of_any(branches, depth=depth + 1)
        parts = schema.get("allOf")
        return self._of_all(parts, depth=depth + 1) if isinstance(parts, list) else ""

    def _of_reference(self, reference: str, *, depth: int) -> str:
        key = (reference, depth)
        if key not in self._found:
            self._found[key] = self.letters(resolve(self._root, reference), depth=depth)
        return self._found[key]

    def _of_any(self, branches: Sequence[object], *, depth: int) -> str:
        each: list[str] = []
        for one in branches:
            letters = self.letters(one, depth=depth)
            if not letters:
                # A branch that says nothing of types allows all of them.
                return ""
            each.append(letters)
        return _distinct(each)

    def _of_all(self, parts: Sequence[object], *, depth: int) -> str:
        each = [letters for one in parts if (letters := self.letters(one, depth=depth))]
        common = [one for one in "".join(each[:1]) if all(one in letters for letters in each)]
        # The letter of whole numbers is not among those of numbers.
        return _distinct(common or each[-1:])


def _letters_of(value: object) -> str:
    """The letters of types that this value, which is no text, has; empty for a text."""
    if isinstance(value, bool):
        return LETTERS["boolean"]
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return LETTERS["integer"] + LETTERS["number"]
    if isinstance(value, float):
        return LETTERS["number"]
    if value is None:
        return LETTERS["null"]
    if isinstance(value, dict):
        return LETTERS["object"]
    return LETTERS["array"] if isinstance(value, list) else ""


def _distinct(letters: Any) -> str:
    return "".join(dict.fromkeys("".join(letters)))
