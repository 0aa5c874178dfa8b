"""The rules of a grammar for one call, or a list of calls, in the format of a family of models.

The rule `call` is what follows the opening mark. The rule `SPACE` comes from the caller.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from quire.openai.tools.argument_types import argument_types
from quire.openai.tools.formats import ToolFormat
from quire.wire.tools import ToolUse
from service.worker.constraints.schemas.checks import SchemaRefused
from service.worker.constraints.tagged_rules import tagged_rules
from service.worker.constraints.terminals import json_rule, quoted, word

#: The ids that models give their calls: those of Mistral.
_ID = "/[a-zA-Z0-9]{9}/"


def call_rules(
    one: ToolFormat,
    special: Mapping[str, int],
    use: ToolUse,
    *,
    is_compact: bool,
) -> list[str]:
    """The rules. SchemaRefused if a schema cannot be enforced.

    `special` has the ids of marks that are special tokens. `is_compact` is that of the JSON.
    """
    rule_of = partial(json_rule, is_compact=is_compact)
    schema_of_call, is_parallel = use.schema_of_call(), use.is_parallel
    types = argument_types(use.tools)
    end = f"SPACE? {word(one.ends[0], special)}" if one.ends else ""
    if one.shape == "list":
        definitions = schema_of_call.get("$defs", {})
        item = {key: value for key, value in schema_of_call.items() if key != "$defs"}
        most = {} if is_parallel else {"maxItems": 1}
        listed = {"type": "array", "items": item, "minItems": 1, **most, "$defs": definitions}
        # A list of calls ends with its bracket, and the mark after it may be left out.
        return ["call: SPACE? json", rule_of("json", listed)]
    if one.shape in ("object", "objects"):
        repeated = ' (SPACE? ";" SPACE? json)*' if one.shape == "objects" and is_parallel else ""
        schema = _with_key(schema_of_call, one.arguments_key)
        return [f"call: SPACE? json{repeated} {end}", rule_of("json", schema)]
    rules, names = [], []
    for index, (name, home) in enumerate(functions_of(schema_of_call)):
        names.append(f"call{index}")
        begin = word(f"{one.prefix}{name}{one.separator or one.name_end}", special)
        if one.id_begin:
            call_id = f"({word(one.id_begin, special)} {_ID})?"
            begin = f"{quoted(name)} {call_id} {word(one.separator, special)}"
        if one.tags is None:
            rules.append(f"call{index}: SPACE? {begin} SPACE? json{index} {end}")
            rules.append(rule_of(f"json{index}", written_arguments(schema_of_call, home)))
        else:
            try:
                arguments = tagged_rules(
                    one.tags,
                    special,
                    schema_of_call["$defs"],
                    home,
                    types=types.get(name, {}) if name in use.strict else {},
                    rule=f"arguments{index}",
                    is_compact=is_compact,
                )
            except SchemaRefused as error:
                raise SchemaRefused(f"in the function {name}: {error}") from error
            rules.append(f"call{index}: SPACE? {begin} arguments{index} {end}")
            rules += arguments
    return [f"call: {' | '.join(names)}", *rules]


def functions_of(schema_of_call: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The name of each function, and the name of the definition that its arguments follow."""
    for call in schema_of_call["anyOf"]:
        properties = call["properties"]
        yield properties["name"]["const"], properties["arguments"]["$ref"].rpartition("/")[2]


def written_arguments(schema_of_call: Mapping[str, Any], home: str) -> dict[str, Any]:
    """The schema of the arguments alone."""
    return {"$ref": f"#/$defs/{home}", "$defs": {home: schema_of_call["$defs"][home]}}


def _with_key(schema_of_call: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The schema with another key for the arguments."""
    calls = [
        call
        | {
            "properties": {
                "name": call["properties"]["name"],
                key: call["properties"]["arguments"],
            },
            "required": ["name", key],
        }
        for call in schema_of_call["anyOf"]
    ]
    return {**schema_of_call, "anyOf": calls}
