"""The rules of a grammar for arguments between tags, where a text has no quotes.

What is between the tags of an argument is such that the parser makes a value of it that the schema
accepts. Knows no tokens.
"""

import json
from collections.abc import Mapping
from typing import Any

from quire.openai.tools.argument_types import LETTERS, TEXT, json_of
from quire.openai.tools.formats import Tags
from service.worker.constraints.schemas.checks import SchemaRefused
from service.worker.constraints.schemas.rewriting import restricting
from service.worker.constraints.terminals import any_of, json_rule, quoted, word

#: The keywords of the arguments of a function beside each of them.
_OF_ALL = frozenset({"type", "properties", "required", "additionalProperties"})
_LENGTHS = ("minLength", "maxLength")
#: The longest text of which a grammar counts the characters.
MAX_COUNTED = 1000
#: The name of an argument that no schema names.
_ANY_NAME = "/[a-zA-Z_][a-zA-Z0-9_-]{0,63}/"


def tagged_rules(
    tags: Tags,
    special: Mapping[str, int],
    definitions: Mapping[str, Any],
    home: str,
    *,
    types: Mapping[str, str],
    rule: str,
    is_compact: bool,
) -> list[str]:
    """The rule `rule` of all arguments of a function, with those that it needs. SchemaRefused.

    The schema of the arguments is `definitions[home]`, and `types` are those that the reader of the
    output knows.
    """
    schema = definitions[home]
    odd = restricting(schema) - _OF_ALL
    if odd:
        raise SchemaRefused(f"`{min(odd)}` of all arguments cannot be enforced in tags")
    properties = schema.get("properties", {})
    writing = _Writing(tags, special, rule, is_compact=is_compact)
    if not properties and schema.get("additionalProperties", True) is not False:
        return writing.any_arguments()
    required = schema.get("required", [])
    missing = [name for name in required if name not in properties]
    if missing:
        raise SchemaRefused(f"the required argument {missing[0]!r} has no schema")
    for index, (name, one) in enumerate(properties.items()):
        if one is False and name not in required:
            continue
        pointer = f"#/$defs/{home}/properties/{name.replace('~', '~0').replace('/', '~1')}"
        reference = {"$ref": pointer, "$defs": {home: schema}}
        is_required = name in required
        own = types.get(name) or None
        writing.argument(index, name, one, own, reference, is_required=is_required)
    return writing.rules()


class _Writing:
    """The rules of one function."""

    def __init__(
        self, tags: Tags, special: Mapping[str, int], rule: str, *, is_compact: bool
    ) -> None:
        self._tags = tags
        self._special = special
        self._rule = rule
        self._is_compact = is_compact
        self._order: list[str] = []
        self._rules: list[str] = []
        self._line = "\n" if tags.has_lines else ""
        self._is_marked = tags.value_end in special

    def rules(self) -> list[str]:
        order = " ".join(self._order)
        end = f" SPACE? {word(self._tags.end, self._special)}" if self._tags.end else ""
        return [f'{self._rule}: "\\n"? {order}{end}', *self._rules]

    def any_arguments(self) -> list[str]:
        """Any arguments at all: those of a function that is not strict."""
        tags, name = self._tags, f"{self._rule}_any"
        key = f"{self._word(tags.key_begin)} {_ANY_NAME} {self._word(tags.key_end)}"
        self._order.append(f"{name}*")
        self._rules.append(f"{name}: {key} {self._opened()} {self._free_text(name)}{self._after()}")
        return self.rules()

    def argument(
        self,
        index: int,
        name: str,
        schema: Any,
        types: str | None,
        reference: Mapping[str, Any],
        *,
        is_required: bool,
    ) -> None:
        """Add the rule of one argument."""
        tags, rule = self._tags, f"{self._rule}_{index}"
        # The parser reads up to the first of these, and drops spaces around the name.
        if tags.key_end[:1] in name or name != name.strip() or len(name) > 64:
            raise SchemaRefused(f"the name {name!r} of an argument cannot stand in a tag")
        key = self._word(tags.key_begin + name + tags.key_end)
        value = self._value(rule, name, schema, types, reference)
        self._rules.append(f"{rule}: {key} {self._opened()} {value}{self._after()}")
        self._order.append(rule if is_required else f"{rule}?")

    def _value(
        self,
        rule: str,
        name: str,
        schema: Any,
        types: str | None,
        reference: Mapping[str, Any],
    ) -> str:
        """The value and its end tag."""
        if types is not None and TEXT not in types:
            self._rules.append(json_rule(f"{rule}_json", reference, is_compact=self._is_compact))
            return f"{rule}_json {self._end()}"
        if schema is False:
            raise SchemaRefused(f"the required argument {name!r} has no value")
        if not isinstance(schema, Mapping):
            schema = {}
        more = restricting(schema) - {"type"}
        if "enum" in schema or "const" in schema:
            self._refuse(more - {"enum" if "enum" in schema else "const"}, name)
            values = schema.get("enum", [schema.get("const")])
            return f"({' | '.join(self._fixed(name, one, types) for one in values)}) {self._end()}"
        if types not in (None, TEXT) and set(types or "") != {TEXT, LETTERS["null"]}:
            message = f"the argument {name!r} may be a text or something else, which tags hide"
            raise SchemaRefused(message)
        if types == TEXT and "anyOf" not in schema and "$ref" not in schema:
            self._refuse(more - {*_LENGTHS}, name)
            lengths = [schema.get(one) for one in _LENGTHS]
            return self._free_text(rule, *lengths)
        if types is None and not restricting(schema):
            return self._free_text(rule)
        if types is None:
            raise SchemaRefused(f"the type of the argument {name!r} is not known where it is read")
        branches = schema.get("anyOf", schema.get("oneOf"))
        is_plain = isinstance(branches, list) and all(
            isinstance(one, Mapping) and not restricting(one) - {"type"} for one in branches
        )
        if (is_plain and not more - {"anyOf", "oneOf"}) or ("type" in schema and not more):
            return self._free_text(rule)
        raise SchemaRefused(f"the schema of the argument {name!r} cannot be enforced in tags")

    def _refuse(self, keywords: frozenset[str], name: str) -> None:
        if keywords:
            message = f"`{min(keywords)}` of the argument {name!r} cannot be enforced in tags"
            raise SchemaRefused(message)

    def _fixed(self, name: str, value: Any, types: str | None) -> str:
        """One value of an enumeration."""
        written = value if isinstance(value, str) else json.dumps(value)
        ends = (self._tags.value_end, "\n") if self._line else (self._tags.value_end,)
        if json.loads(json_of(written, types)) != value or any(one in written for one in ends):
            raise SchemaRefused(
                f"the value {value!r} of the argument {name!r} cannot stand in tags"
            )
        return quoted(written) if written else '""'

    def _free_text(self, rule: str, least: Any = None, most: Any = None) -> str:
        """Any text that has no end tag, and the end tag; `least` and `most` are characters."""
        if max(least or 0, most or 0) > MAX_COUNTED:
            raise SchemaRefused(f"a text in tags is counted up to {MAX_COUNTED} characters only")
        counted = f"{{{int(least or 0)},{'' if most is None else int(most)}}}"
        repeat = "*" if not least and most is None else counted
        text = f"/(?s:.{repeat})/ & ~/(?s:.*)({any_of([self._tags.value_end])})(?s:.*)/"
        upper = f"TEXT_{rule.upper()}"
        if self._is_marked:
            self._rules.append(f"{upper}: {text}")
            line = ' "\\n"' if self._line else ""
            return f"{upper}{line} {self._word(self._tags.value_end)}"
        # Lazy: the text ends where its end tag does, and both are read as one.
        self._rules.append(f"{rule}_text[lazy]: {upper}")
        self._rules.append(f"{upper}: CHARS_{upper} {quoted(self._line + self._tags.value_end)}")
        self._rules.append(f"CHARS_{upper}: {text}")
        return f"{rule}_text"

    def _opened(self) -> str:
        return quoted(self._line) if self._line else self._word(f"\n{self._tags.value_begin}")

    def _end(self) -> str:
        return self._word(self._line + self._tags.value_end)

    def _after(self) -> str:
        return ' "\\n"?'

    def _word(self, text: str) -> str:
        return word(text, self._special)
