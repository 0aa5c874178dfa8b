"""The types of arguments between tags: found in the schemas, kept in the record, and used."""

import json
from typing import Any

import pytest

from quire.openai.tools import argument_types as module
from quire.openai.tools.answers import message_of
from quire.openai.tools.argument_types import (
    MAX_DEPTH,
    MAX_KEPT_LENGTH,
    argument_types,
    argument_types_from,
    json_of,
)


def types_of(**properties: Any) -> dict[str, str]:
    parameters = {
        "properties": properties,
        "$defs": {"id": {"type": "string"}, "me": {"$ref": "#/$defs/me"}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return argument_types([tool]).get("f", {})


@pytest.mark.parametrize(
    ("schema", "letters"),
    [
        ({"type": "string"}, "s"),
        ({"type": ["string", "null"]}, "sz"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "sz"),
        ({"anyOf": [{"type": "string"}, {}]}, None),
        ({"enum": ["a", 1, None]}, "siz"),
        ({"const": 2.5}, "n"),
        ({"$ref": "#/$defs/id"}, "s"),
        ({"$ref": "#/$defs/me"}, None),
        ({"$ref": "#/$defs/none"}, None),
        ({}, None),
        (True, None),
        ({"type": "array", "items": {"type": "string"}}, "a"),
    ],
)
def test_the_types_are_those_of_the_schema(schema: Any, letters: str | None) -> None:
    assert types_of(a=schema) == ({} if letters is None else {"a": letters})


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("12", "s", "12"),
        ("12", "sz", "12"),
        ("null", "sz", None),
        ("None", "z", None),
        ("12", None, 12),
        ("12", "i", 12),
        ("12", "n", 12),
        ("2.0", "i", 2.0),
        ("2.5", "i", "2.5"),
        ("True", "b", True),
        (" {} ", "o", {}),
        ("a b", None, "a b"),
        ("NaN", None, "NaN"),
        ('"a"', None, '"a"'),
        ("9" * 5000, None, "9" * 5000),
        ("[" * 100_000, "a", "[" * 100_000),
    ],
    ids=lambda one: str(one)[:20],
)
def test_a_value_is_json_only_if_the_function_takes_such_a_value(
    text: str, types: str | None, value: Any
) -> None:
    assert json.loads(json_of(text, types)) == value


def test_unions_that_refer_to_each_other_are_not_walked_on_every_way(monkeypatch) -> None:
    followed: list[str] = []

    def counted(reference: str, root: Any) -> object:
        followed.append(reference)
        assert len(followed) <= 2 * MAX_DEPTH, "each reference is followed once at each depth"
        return resolved(reference, root)

    resolved = module._resolved
    monkeypatch.setattr(module, "_resolved", counted)
    last = {"anyOf": [{"type": "string"}]}
    levels = {
        f"l{n}": {"anyOf": [{"$ref": f"#/properties/l{n + 1}"}] * 40} if n < 4 else last
        for n in range(5)
    }
    assert types_of(a={"anyOf": [{"$ref": "#/properties/a"}] * 40}) == {}
    assert types_of(**levels)["l1"] == "s"


def test_what_is_kept_is_bounded_and_comes_back() -> None:
    tools = [
        {
            "function": {
                "name": f"f{n}",
                "parameters": {"properties": {"x" * 100: {"type": "string"}}},
            }
        }
        for n in range(100)
    ]
    found = argument_types(tools)
    assert 0 < sum(len(key) for types in found.values() for key in types) <= MAX_KEPT_LENGTH
    assert argument_types_from(json.loads(json.dumps(found))) == found
    assert argument_types_from("no map") == argument_types_from(None) == {}


def test_a_message_has_the_types_of_the_caller() -> None:
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    for types, value in (({"f": {"a": "s"}}, "1"), ({}, 1)):
        (call,) = message_of("a", 0, ["f"], text, types=types)["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": value}
