"""The types of arguments between tags: found in the schemas, kept in the record, and used."""

import json
from typing import Any

import pytest

from quire.openai.tools import argument_types as module
from quire.openai.tools.answers import message_of
from quire.openai.tools.argument_types import (
    MAX_DEPTH,
    argument_types,
    argument_types_from,
    json_of,
)
from quire.wire.tools import MAX_TOOLS


def types_of(**properties: Any) -> dict[str, str]:
    parameters = {
        "properties": properties,
        "$defs": {
            "id": {"type": "string"},
            "me": {"$ref": "#/$defs/me"},
            "list": {"anyOf": [{"type": "null"}, {"type": "string"}]},
        },
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
        ({"allOf": [{"$ref": "#/$defs/id"}, {"minLength": 2}]}, "s"),
        ({"allOf": [{"type": ["string", "null"]}, {"enum": ["a"]}]}, "s"),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, "i"),
        ({"$ref": "#/properties/a/anyOf/0"}, None),
        ({"$ref": "#/$defs/list/anyOf/1"}, "s"),
        ({"$ref": "#id"}, None),
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
        ("1e999", "n", float("inf")),
        ("1e999", "s", "1e999"),
        ("[1]", "o", [1]),
        ("{'a': \"b'\", 'c': [None, 1.5]}", "o", {"a": "b'", "c": [None, 1.5]}),
        ("{'a': 'it\\'s \\x41\\U0001f600'}", "o", {"a": "it's A\U0001f600"}),
        ("['True', True]", "a", ["True", True]),
        ("{'a': 1}", None, "{'a': 1}"),
        ("{'a': 1}", "os", "{'a': 1}"),
        ("{'a': 1", "o", "{'a': 1"),
        ("{1: 2}", "o", "{1: 2}"),
        ("[" * 100_000, "a", "[" * 100_000),
    ],
    ids=lambda one: str(one)[:20],
)
def test_a_value_is_json_only_if_the_function_takes_such_a_value(
    text: str, types: str | None, value: Any
) -> None:
    assert json.loads(json_of(text, types)) == value


@pytest.mark.parametrize("types", [None, "i", "n"])
def test_a_number_of_any_length_is_one(types: str | None) -> None:
    assert json_of("9" * 5000, types) == "9" * 5000
    assert json_of("9" * 5000, "s") == f'"{"9" * 5000}"'


def test_unions_that_refer_to_each_other_are_not_walked_on_every_way(monkeypatch) -> None:
    followed: list[str] = []

    def counted(root: Any, reference: str) -> object:
        followed.append(reference)
        assert len(followed) <= 2 * MAX_DEPTH, "each reference is followed once at each depth"
        return resolved(root, reference)

    resolved = module.resolve
    monkeypatch.setattr(module, "resolve", counted)
    last = {"anyOf": [{"type": "string"}]}
    levels = {
        f"l{n}": {"anyOf": [{"$ref": f"#/properties/l{n + 1}"}] * 40} if n < 4 else last
        for n in range(5)
    }
    assert types_of(a={"anyOf": [{"$ref": "#/properties/a"}] * 40}) == {}
    assert types_of(**levels)["l1"] == "s"


def test_the_types_of_as_many_functions_as_there_may_be_are_known_and_come_back() -> None:
    types = {"x" * 90 + str(n): "s" for n in range(6)}
    properties = {name: {"type": "string"} for name in types}
    tools = [
        {"function": {"name": f"f{n}", "parameters": {"properties": properties}}}
        for n in range(MAX_TOOLS)
    ]
    found = argument_types(tools)
    assert found == {f"f{n}": types for n in range(MAX_TOOLS)}
    assert argument_types_from(json.loads(json.dumps(found))) == found
    assert argument_types_from("no map") == argument_types_from(None) == {}


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"a": {"type": "string"}}}}},
        {"allOf": [{"properties": {"b": {}}}, {"properties": {"a": {"type": "string"}}}]},
        {"anyOf": [{"properties": {"a": {"type": "string"}}}, {"$ref": "#"}]},
        {"additionalProperties": {"type": "string"}},
        {"additionalProperties": {"type": "string"}, "properties": {"b": {}, " ": {}}},
    ],
)
def test_arguments_have_types_wherever_the_schema_declares_them(parameters: Any) -> None:
    types = argument_types([{"function": {"name": "f", "parameters": parameters}}])
    text = "<tool_call>f<arg_key>{}</arg_key><arg_value>1</arg_value></tool_call>"
    for name, value in (("a", "1"), ("b", 1)):
        if name == "b" and "b" not in str(parameters):
            continue
        (call,) = message_of("a", 0, ["f"], text.format(name), types=types)["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {name: value}


def test_a_message_has_the_types_of_the_caller() -> None:
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    for types, value in (({"f": {"a": "s"}}, "1"), ({}, 1)):
        (call,) = message_of("a", 0, ["f"], text, types=types)["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": value}
