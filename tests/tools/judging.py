"""Whether an output has the calls that the gateway told, and whether a schema accepts them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jsonschema
from transformers.utils.chat_parsing import parse_response

from tests.tools.formats import Format

PLACE = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "remark": {"type": "string"},
        "unit": {"type": ["string", "null"]},
        "at": {"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 2},
    },
    "required": ["city", "remark"],
    "additionalProperties": False,
}
SCHEMAS: Mapping[str, Any] = {
    "weather": PLACE,
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]

Calls = Sequence[tuple[str, Any]]


def independent_calls(one: Format, text: str) -> list[tuple[str, Any]]:
    """The calls of an output as transformers reads them, or json. ValueError if it cannot."""
    found: list[Any] = []
    if one.reading:
        message = parse_response(text, one.template, prefix="", tools=TOOLS)
        found = list(message.get("tool_calls", []))
    else:
        for match in re.finditer(one.after, text):
            found += _values(text, match.end(), **match.groupdict())
    functions = [call.get("function", call) for call in found]
    return [
        (function["name"], function.get("arguments", function.get("parameters")))
        for function in functions
    ]


def _values(text: str, at: int, *, name: str | None = None) -> Iterator[Any]:
    """The calls that stand at this place: one, a list, or several with semicolons between them."""
    decoder = json.JSONDecoder()
    while True:
        at += len(text[at:]) - len(text[at:].lstrip())
        value, at = decoder.raw_decode(text, at)
        if name is not None:
            yield {"name": name, "arguments": value}
        else:
            yield from value if isinstance(value, list) else [value]
        rest = text[at:].lstrip()
        if not rest.startswith(";") or name is not None or isinstance(value, list):
            return
        at = len(text) - len(rest) + 1


def told_calls(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The calls of a message of the gateway."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


def fault_of(
    one: Format,
    text: str,
    message: Mapping[str, Any],
    *,
    schemas: Mapping[str, Any] = SCHEMAS,
) -> str:
    """Why the calls of a complete output are wrong; empty if they are right."""
    try:
        told, found = told_calls(message), independent_calls(one, text)
        if told != found:
            return f"the gateway tells {told}, transformers {found}"
        for name, arguments in told:
            jsonschema.validate(arguments, schemas[name])
    except (ValueError, KeyError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""
