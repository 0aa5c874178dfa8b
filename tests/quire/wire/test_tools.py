"""What a chat may say about functions, and the schema of an output that must call one."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from quire.errors import InvalidRequest
from quire.openai.tools.parser import ToolCallParser
from quire.wire.arguments import build_request
from quire.wire.protocol import GenerationRequest
from quire.wire.sampling import ParsedBody, parse_body
from quire.wire.tools import MAX_TOOLS

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Is it warm in Rome?"}]}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
#: A schema that refers to itself.
TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 3},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["name", "next"],
            "additionalProperties": False,
        }
    },
}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [function(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


WEATHER, FORESTS = function("weather", parameters=CITY), function("plant", parameters=TREE)
NOW = function("now", description="The time.")
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def parsed(**fields: Any) -> ParsedBody:
    return parse_body("chat.completions", CHAT | fields)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [NOW] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type"),
        ({"tools": [WEATHER, {"type": "function"}]}, "tools.1.function"),
        ({"tools": [function("two words")]}, "tools.0.function.name"),
        ({"tools": [function("n" * 65)]}, "tools.0.function.name"),
        ({"tools": [NOW, NOW]}, "tools.1.function.name"),
        ({"tools": [function("f", parameters=[])]}, "tools.0.function.parameters"),
        ({"tools": [function("f", parameters={"type": "array"})]}, "tools.0.function.parameters"),
        ({"tools": [function("f", description=3)]}, "tools.0.function.description"),
        ({"tools": [function("f", strict="yes")]}, "tools.0.function.strict"),
        ({"tools": [function("f", returns={})]}, "tools.0.function.returns"),
        ({"tools": [NOW], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}},
         "tool_choice.allowed_tools.mode"),
        ({"tools": [NOW], "tool_choice": allowed("none", "now")}, "tool_choice.allowed_tools.mode"),
        ({"tools": [NOW], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tools": [NOW], "tool_choice": allowed("auto", "now", "later")},
         "tool_choice.allowed_tools.tools.1.function.name"),
        ({"tool_choice": allowed("auto", "now")}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": function("later")}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [NOW], "regex": "a"}, "regex"),
        ({"tools": [NOW], "guided_choice": ["a"]}, "guided_choice"),
        ({"tools": [NOW], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
        ({"chat_template_kwargs": {"deep": {}}}, "chat_template_kwargs.deep"),
        ({"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(**fields)
    assert caught.value.field == f"body.{path}"


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"role": "assistant", "tool_calls": {}}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool_calls.0.function"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "tool_calls.0.function.name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
         "tool_calls.0.function.arguments"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
         "tool_calls.0.function.arguments"),
        ({"role": "assistant", "content": "x", "reasoning_content": 3}, "reasoning_content"),
        ({"role": "tool", "tool_call_id": "c1"}, "content"),
        ({"role": "user", "content": None, "tool_calls": [CALL]}, "content"),
    ],
)  # fmt: skip
def test_a_wrong_message_is_named(message: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(messages=[*CHAT["messages"], message])
    assert caught.value.field == f"body.messages.1.{path}"


def test_templates_get_the_arguments_of_earlier_calls_as_objects() -> None:
    call = {"id": "c1", "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}  # fmt: skip
    empty = {"function": {"name": "now", "arguments": ""}}
    said = {"role": "assistant", "content": None, "tool_calls": [call, empty]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "31"}
    messages = parsed(messages=[*CHAT["messages"], said, result], tools=[WEATHER]).messages
    assert messages is not None and messages[1]["content"] is None
    told = [one["function"]["arguments"] for one in messages[1]["tool_calls"]]
    assert told == [{"city": "Rome"}, {}]
    assert messages[2] == result


def called_with(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"a": 123456789012345678901234567890}', 123456789012345678901234567890),
        (f'{{"a": {"9" * 4300}}}', 10**4300 - 1),
        (f'{{"a": -{"9" * 4300}}}', 1 - 10**4300),
        ('{"a": [{"b": 18446744073709551616}]}', [{"b": 1 << 64}]),
        ('{"a": 0.1}', 0.1),
        ('{"a": -1.5e300}', -1.5e300),
        ({"a": (1 << 64) - 1}, (1 << 64) - 1),
    ],
    ids=lambda one: str(type(one)),
)
def test_numbers_of_earlier_calls_are_exact(arguments: Any, value: Any) -> None:
    sent = GenerationRequest(
        kind="chat.completions", body={"messages": called_with(arguments)}
    ).encode()
    messages = GenerationRequest.decode(sent).parse_body().messages
    assert messages is not None
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": value}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (f'{{"a": {"9" * 5000}}}', "a must have at most 4300 digits"),
        (f'{{"b": 1, "a": [{{"c": -{"9" * 5000}}}]}}', "a.0.c must have at most 4300 digits"),
        ('{"a": 1e400}', "a must be a finite number"),
        ('{"a": NaN}', "a must be a finite number"),
        ('{"a": {"b": 1, "b": 2}}', "a.b comes twice"),
        ('{"a": ' + "[" * 100_000, "is not JSON"),
        ("[1]", "is not an object"),
        ({"a": float("nan")}, "cannot be written as JSON"),
        ({"a": b"x"}, "cannot be written as JSON"),
        ({"a": 10**5000}, "cannot be written as JSON"),
    ],
    ids=lambda one: str(one)[:30] if isinstance(one, str) else str(type(one)),
)
def test_arguments_that_no_template_could_get_as_they_are_are_refused_by_their_path(
    arguments: Any, reason: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request({"messages": called_with(arguments)}, tenant="t", now_ms=None)
    assert caught.value.field == "body.messages.1.tool_calls.0.function.arguments"
    assert reason in caught.value.message


def test_nothing_is_declared_where_nothing_may_be_called() -> None:
    assert parsed(tools=[NOW], tool_choice="none").tools is None
    assert parsed(tools=[]).tools is None
    use = parsed(tools=[NOW, WEATHER]).tools
    assert use is not None and (use.names, use.required) == (("now", "weather"), ())


def test_the_fields_cross_the_wire() -> None:
    body = CHAT | {"tools": [FORESTS], "chat_template_kwargs": {"enable_thinking": False}}
    sent = GenerationRequest(kind="chat.completions", body=body).encode()
    received = GenerationRequest.decode(sent).parse_body()
    assert received.tools is not None and received.tools.names == ("plant",)
    assert received.template_arguments == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "valid", "invalid"),
    [
        (
            {"tool_choice": "required"},
            [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "now", "arguments": {}}],
            [],
        ),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"name": "plant", "arguments": {"root": {"name": "a", "next": None}}},
            {"name": "plant", "arguments": {"root": {"name": "a", "next": {}}}},
        ),
        (
            {"tool_choice": function("weather")},
            {"name": "weather", "arguments": {"city": "Rome"}},
            {"name": "now", "arguments": {}},
        ),
    ],
)
def test_a_required_call_has_a_schema(fields: dict[str, Any], valid: Any, invalid: Any) -> None:
    body = parsed(tools=[WEATHER, NOW, FORESTS], **fields)
    assert body.constraint is not None and body.constraint.field == "body.tools"
    jsonschema.validate(valid, body.constraint.value)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(invalid, body.constraint.value)


DATA: dict[str, Any] = {"$ref": "#/$defs/a", "x": [{"$ref": "#"}]}
#: A schema of arguments, a value that it accepts, and one that it does not.
REFERENCES = [
    ({"v": {"const": DATA}}, {"v": DATA}, {"v": {"$ref": "#/$defs/function0/$defs/a"}}),
    ({"v": {"enum": [DATA, 1]}}, {"v": DATA}, {"v": {"$ref": "#/$defs/function0/$defs/a"}}),
    ({"v": {"anyOf": [{"const": [DATA]}]}}, {"v": [DATA]}, {"v": DATA}),
    ({"$ref": {"const": 1}}, {"$ref": 1}, {"$ref": 2}),
    ({"$ref": {"$ref": "#/$defs/a"}}, {"$ref": 1}, {"$ref": 2}),
    ({"const": {"$ref": "#/$defs/a"}}, {"const": 1}, {"const": 2}),
    ({"enum": {"items": {"$ref": "#/$defs/enum"}}}, {"enum": [1]}, {"enum": [2]}),
    ({"v": {"$ref": "#/$defs/a", "default": DATA, "examples": [DATA]}}, {"v": 1}, {"v": 2}),
    ({"v": {"$ref": "#/parts/b"}}, {"v": 1}, {"v": 2}),
]


@pytest.mark.parametrize(("properties", "valid", "invalid"), REFERENCES)
def test_only_references_of_a_required_function_are_changed(
    properties: dict[str, Any], valid: Any, invalid: Any
) -> None:
    parameters = {
        "properties": properties,
        "$defs": {"a": {"const": 1}, "enum": {"$ref": "#/$defs/a"}},
        "parts": {"b": {"$ref": "#/$defs/a"}},
    }
    use = parsed(tools=[function("f", parameters=parameters, strict=True)], tool_choice="required")
    assert use.tools is not None and use.constraint is not None
    free = parsed(tools=[function("f", parameters=parameters, strict=True)])
    assert free.tools is not None
    for schema, wrap in ((use.constraint.value, list), (free.tools.schema_of_call(), next)):
        jsonschema.validate(wrap(iter([{"name": "f", "arguments": valid}])), schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrap(iter([{"name": "f", "arguments": invalid}])), schema)
    defaults = [one for one in walked(use.constraint.value) if isinstance(one, dict)]
    assert [one["default"] for one in defaults if "default" in one] == [
        DATA for one in properties.values() if "default" in one
    ]


def walked(value: Any) -> Iterator[Any]:
    yield value
    for one in value.values() if isinstance(value, dict) else value:
        if isinstance(one, dict | list):
            yield from walked(one)


def test_a_reference_by_another_name_than_a_path_stays_what_it_is() -> None:
    """`#0` must not become `#/$defs/f10`, which is the schema of another function."""
    anchor = {"properties": {"v": {"$ref": "#0"}}}
    tools = [function(f"f{n}", parameters=anchor) for n in range(11)]
    body = parsed(tools=tools, tool_choice="required")
    assert body.constraint is not None
    assert body.constraint.value["$defs"]["f1"]["properties"] == anchor["properties"]


def test_a_function_that_is_named_is_called_once_also_if_it_is_the_only_one() -> None:
    body = parsed(tools=[WEATHER], tool_choice=function("weather"))
    call = {"name": "weather", "arguments": {"city": "Rome"}}
    assert body.constraint is not None
    jsonschema.validate(call, body.constraint.value)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([call], body.constraint.value)
    # The control: `required` allows several.
    several = parsed(tools=[WEATHER], tool_choice="required")
    assert several.constraint is not None
    jsonschema.validate([call, call], several.constraint.value)


def test_what_the_schema_accepts_is_read_as_calls() -> None:
    calls = [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "now", "arguments": {}}]
    pieces = ToolCallParser({"weather", "now"}).feed(json.dumps(calls))
    assert [one.text for one in pieces] == ["weather", '{"city": "Rome"}', "now", "{}"]


def test_a_client_passes_functions_with_its_messages() -> None:
    request, body = build_request(
        {"messages": CHAT["messages"], "tools": (WEATHER,), "tool_choice": "required"},
        tenant="t", now_ms=None,
    )  # fmt: skip
    assert request.body["tools"] == [WEATHER]
    assert body.tools is not None and body.tools.required == ("weather",)


def test_functions_need_messages() -> None:
    with pytest.raises(InvalidRequest, match="tools: needs messages"):
        build_request({"prompt": "x", "tools": [WEATHER]}, tenant="t", now_ms=None)


def test_only_allowed_functions_are_told_and_called() -> None:
    tools = [WEATHER, function("plant", parameters=TREE, strict=True), NOW]
    use = parsed(tools=tools, tool_choice=allowed("auto", "now", "plant")).tools
    assert use is not None
    assert (use.names, use.required, use.is_parallel) == (("plant", "now"), (), True)
    # The field is that of the caller's list.
    assert (use.strict, use.strict_field) == (("plant",), "body.tools.1.function.strict")
    body = parsed(tools=tools, tool_choice=allowed("required", "now", "now"))
    assert body.tools is not None and body.tools.required == ("now",)
    assert body.constraint is not None and body.constraint.kind == "json_schema"
    called = [{"name": "now", "arguments": {}}]
    jsonschema.validate(called, body.constraint.value)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"name": "plant", "arguments": {}}], body.constraint.value)


def test_a_form_of_the_content_stands_beside_functions_that_may_be_called() -> None:
    wanted = {"response_format": {"type": "json_object"}}
    body = parsed(tools=[NOW, WEATHER], **wanted)
    assert body.constraint is not None and body.tools is not None
    assert (body.constraint.kind, body.constraint.field) == ("json_object", "body.response_format")
    # An output that must call has no content, and one that may not call is an answer.
    required = parsed(tools=[NOW], tool_choice="required", **wanted).constraint
    assert required is not None and required.field == "body.tools"
    none = parsed(tools=[NOW], tool_choice="none", **wanted)
    assert none.tools is None and none.constraint == body.constraint
