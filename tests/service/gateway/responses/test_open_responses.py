"""The cases of Open Responses, and its rules for every body and every event.

Written from the specification: its suite runs in a browser, and no package has it. Images are the
one case that Quire refuses: it serves text.
"""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.service.gateway.builders import GatewayThread
from tests.service.gateway.front import Reply

PATH = "/v1/responses"

#: The fields that every response must have, whatever its call had.
REQUIRED = (
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model"),
    *("previous_response_id", "instructions", "output", "error", "tools", "tool_choice"),
    *("truncation", "parallel_tool_calls", "text", "top_p", "presence_penalty"),
    *("frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
)
TERMINAL = {"response.completed", "response.incomplete", "response.failed"}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string"}},
        "required": ["location"],
    },
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"location": "Paris"}}</tool_call>'


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a basic text": ({"input": [user("Say hello in exactly 3 words.")]}, "Hello to you"),
    "a string": ({"input": "Say hello."}, "Hello"),
    "a system prompt": (
        {
            "input": [
                {"type": "message", "role": "system", "content": "You are a pirate."},
                user("Say hello."),
            ]
        },
        "Ahoy",
    ),
    "a developer's prompt": (
        {"input": [{"type": "message", "role": "developer", "content": "Be brief."}, user("?")]},
        "Yes",
    ),
    "a tool call": ({"input": [user("The weather in Paris?")], "tools": [WEATHER]}, CALL),
    "several turns": (
        {
            "input": [
                user("My name is Alice."),
                {"type": "message", "role": "assistant", "content": "Hello Alice!"},
                user("What is my name?"),
            ]
        },
        "Alice",
    ),
    "the result of a tool": (
        {
            "input": [
                user("The weather?"),
                {
                    "type": "function_call",
                    "call_id": "c1",
                    "name": "get_weather",
                    "arguments": "{}",
                },
                {"type": "function_call_output", "call_id": "c1", "output": "31 degrees"},
            ],
            "tools": [WEATHER],
        },
        "31 degrees",
    ),
}


def check_body(body: dict[str, Any]) -> None:
    assert [name for name in REQUIRED if name not in body] == []
    assert body["object"] == "response"
    Response.model_validate(body, strict=True)
    for item in body["output"]:
        assert item["id"]
        assert item["status"] in ("in_progress", "completed", "incomplete")


def check_stream(reply: Reply) -> list[dict[str, Any]]:
    """The events, each of which is valid, in the order and with the numbers that it must have."""
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    *events, done = [event for event in reply.events if event.data]
    assert done.data == "[DONE]"
    bodies = [event.body for event in events]
    # The field `event` of each must be its type.
    names = [line[7:] for line in reply.text.splitlines() if line.startswith("event: ")]
    assert names == [body["type"] for body in bodies]
    assert [body["sequence_number"] for body in bodies] == list(range(len(bodies)))
    for body in bodies:
        EVENTS.validate_python(body, strict=True)
        if "response" in body:
            check_body(body["response"])
    assert [body["type"] in TERMINAL for body in bodies] == [False] * (len(bodies) - 1) + [True]
    return bodies


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_answered_whole_and_as_a_stream(gateway: GatewayThread, script, name):
    fields, output = CASES[name]
    script.pieces = [output[begin : begin + 6] for begin in range(0, len(output), 6)]
    call = {"model": "fake", **fields}
    reply = gateway.ask("POST", PATH, call)
    assert reply.status == 200
    check_body(reply.body)
    assert reply.body["status"] == "completed"
    items = reply.body["output"]
    if output == CALL:
        assert [item["type"] for item in items] == ["function_call"]
        assert json.loads(items[0]["arguments"]) == {"location": "Paris"}
    else:
        assert items[0]["content"][0]["text"] == output
    bodies = check_stream(gateway.ask("POST", PATH, call | {"stream": True}))
    streamed = bodies[-1]["response"]["output"]
    without_ids = [
        [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in one]
        for one in (items, streamed)
    ]
    assert without_ids[0] == without_ids[1]


def test_a_damaged_image_is_refused_by_its_path(gateway: GatewayThread):
    parts = [
        {"type": "input_text", "text": "What do you see?"},
        {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="},
    ]
    reply = gateway.ask("POST", PATH, {"model": "fake", "input": [user("x") | {"content": parts}]})
    assert (reply.status, reply.error["param"]) == (400, "input.0.content.1.image_url")


def test_an_event_that_breaks_a_rule_is_noticed(gateway: GatewayThread):
    reply = gateway.ask("POST", PATH, {"model": "fake", "input": "x", "stream": True})
    for old, new in [
        ('"sequence_number":3', '"sequence_number":4'),
        ("event: response.created", "event: response.begun"),
        ('"content_index":0', '"content_index":"0"'),
        ('"truncation":"disabled"', '"truncated":"disabled"'),
    ]:
        broken = Reply(reply.status, reply.headers, reply.text.replace(old, new, 1))
        assert broken.text != reply.text
        with pytest.raises((AssertionError, ValueError)):
            check_stream(broken)
