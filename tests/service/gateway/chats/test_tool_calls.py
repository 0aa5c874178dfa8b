"""Calls of functions over HTTP: whole, as a stream, and as a stream that goes on elsewhere."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.service.gateway.builders import GatewayThread
from tests.service.gateway.front import CHAT, Event

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Is it warm in Rome?"}],
    "tools": [WEATHER, NOW],
}
OUTPUT = (
    "I shall ask.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Rome", "days": [1, 2]}}'
    '\n</tool_call>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
CALLS = [("weather", {"city": "Rome", "days": [1, 2]}), ("now", {})]


def in_pieces(text: str, size: int = 7) -> list[str]:
    return [text[begin : begin + size] for begin in range(0, len(text), size)]


@pytest.fixture(autouse=True)
def _calls(script: Any) -> None:
    script.pieces = in_pieces(OUTPUT)


def told(calls: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def test_a_whole_answer_has_the_calls(client: Any) -> None:
    (choice,) = client.chat.completions.create(model="fake", **BODY).choices
    assert choice.message.content == "I shall ask."
    assert told(choice.message.tool_calls) == CALLS
    assert choice.finish_reason == "tool_calls"
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_a_stream_comes_to_the_same_calls(client: Any, fake: Any) -> None:
    with client.chat.completions.stream(model="fake", **BODY) as stream:
        streamed = stream.get_final_completion()
    (choice,) = streamed.choices
    again = client.chat.completions.create(
        model="fake", **BODY, extra_headers={"Idempotency-Key": "k"}
    )
    assert choice.message.content == again.choices[0].message.content
    assert told(choice.message.tool_calls) == CALLS
    assert choice.finish_reason == "tool_calls"
    assert fake.requests[0].body["tools"] == BODY["tools"]


def test_the_result_of_a_call_goes_back_to_the_model(client: Any, fake: Any, script: Any) -> None:
    first = client.chat.completions.create(model="fake", **BODY).choices[0].message
    script.pieces = ["31 degrees."]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "31"} for call in first.tool_calls
    ]
    messages = [*BODY["messages"], first.to_dict(), *results]
    last = client.chat.completions.create(model="fake", **BODY | {"messages": messages})
    assert last.choices[0].message.content == "31 degrees."
    assert last.choices[0].message.tool_calls is None
    assert last.choices[0].finish_reason == "stop"
    sent = fake.requests[-1].parse_body().messages
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == CALLS[0][1]


def told_of(body: Any) -> list[tuple[str, Any]]:
    functions = [one["function"] for one in body["choices"][0]["message"]["tool_calls"]]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


def deltas_of(events: list[Event]) -> list[Any]:
    return [event.choice["delta"] for event in events if event.data not in ("", "[DONE]")]


#: Calls in the format of Mistral Small 3.2, with arguments as Python writes them, and in tags.
OTHER_OUTPUTS = [
    (
        """[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{'city': "Rome", "days": [1, 2]}"""
        "[TOOL_CALLS]now[CALL_ID]f5G6h7I8j[ARGS]{}"
    ),
    (
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days"
        "</arg_key><arg_value>[1, 2]</arg_value></tool_call><tool_call>now</tool_call>"
    ),
]


@pytest.mark.parametrize("output", [OUTPUT, *OTHER_OUTPUTS])
def test_a_stream_cut_at_any_event_goes_on_with_the_same_deltas(
    start: Callable[..., GatewayThread], script: Any, output: str
) -> None:
    first, second = start(), start()
    script.pieces = in_pieces(output)
    request_id = first.ask("POST", CHAT, BODY).request_id
    with first.resume(request_id) as whole:
        events = whole.rest()
    assert sum("tool_calls" in delta for delta in deltas_of(events)) > 3
    assert told_of(first.get(f"/v1/requests/{request_id}").body) == CALLS
    for index, event in enumerate(events[1:-2], start=1):
        with second.resume(request_id, event.id) as again:
            assert deltas_of(again.rest()) == deltas_of(events[index + 1 :]), event


def test_a_stream_goes_on_from_a_number_of_tokens_within_a_piece(gateway: GatewayThread) -> None:
    """The fake model's tokens are characters."""
    request_id = gateway.ask("POST", CHAT, BODY).request_id
    begin = OUTPUT.index("Rome") + 2
    with gateway.resume(request_id, str(begin)) as again:
        deltas = deltas_of(again.rest())
    arguments = "".join(
        call["function"]["arguments"]
        for delta in deltas
        for call in delta.get("tool_calls", [])
        if call["index"] == 0
    )
    assert arguments == 'me", "days": [1, 2]}'


def test_each_choice_has_calls_of_its_own(gateway: GatewayThread) -> None:
    reply = gateway.ask("POST", CHAT, BODY | {"n": 2})
    ids = [call["id"] for one in reply.body["choices"] for call in one["message"]["tool_calls"]]
    assert len(set(ids)) == 4
    with gateway.resume(reply.request_id) as whole:
        events = whole.rest()
    begun = [
        call["id"]
        for delta in deltas_of(events)
        for call in delta.get("tool_calls", [])
        if "id" in call
    ]
    assert sorted(begun) == sorted(ids)


def test_an_output_that_ends_early_says_so(client: Any, script: Any) -> None:
    script.pieces = in_pieces('<tool_call>{"name": "weather", "arguments": {"city": "Ro')
    (choice,) = client.chat.completions.create(model="fake", **BODY).choices
    assert choice.message.content is None
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Ro'


def test_a_function_that_was_not_declared_is_content(client: Any) -> None:
    body = BODY | {"tools": [NOW]}
    (choice,) = client.chat.completions.create(model="fake", **body).choices
    assert choice.message.content.startswith("I shall ask.\n<tool_call>")
    assert told(choice.message.tool_calls) == CALLS[1:]


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_functions_everything_is_content(client: Any, fields: dict[str, Any]) -> None:
    body = {"messages": BODY["messages"]} | fields
    (choice,) = client.chat.completions.create(model="fake", **body).choices
    assert (choice.message.content, choice.message.tool_calls) == (OUTPUT, None)
    assert choice.finish_reason == "stop"


def test_a_wrong_function_is_refused_by_its_path(gateway: GatewayThread) -> None:
    wrong = BODY | {"tools": [WEATHER, {"type": "function", "function": {"name": "two words"}}]}
    reply = gateway.ask("POST", CHAT, wrong)
    assert (reply.status, reply.error["param"]) == (400, "tools.1.function.name")


def test_logprobs_come_with_each_piece(gateway: GatewayThread) -> None:
    body = BODY | {"stream": True, "logprobs": True}
    events = gateway.ask("POST", CHAT, body).events
    texts = [
        token["token"]
        for event in events
        if event.data not in ("", "[DONE]") and event.choice["logprobs"]
        for token in event.choice["logprobs"]["content"]
    ]
    assert "".join(texts) == OUTPUT


def many_functions() -> list[Any]:
    """80 functions of 6 arguments, which are texts."""
    properties = {f"a_longer_name_{n}": {"type": "string"} for n in range(6)}
    named = [{"name": f"f{n}", "parameters": {"properties": properties}} for n in range(80)]
    return [{"type": "function", "function": one} for one in named]


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "many"}])
def test_the_arguments_of_the_last_of_many_functions_have_their_types_at_every_gateway(
    start: Callable[..., GatewayThread], script: Any, headers: dict[str, str]
) -> None:
    first, second = start(), start()
    call = "<arg_key>a_longer_name_5</arg_key><arg_value>123</arg_value></tool_call>"
    script.pieces = in_pieces(f"<tool_call>f79{call}")
    body = BODY | {"tools": many_functions()}
    reply = first.ask("POST", CHAT, body, **headers)
    again = second.ask("GET", f"/v1/requests/{reply.request_id}")
    assert reply.body["choices"] == again.body["choices"]
    (told,) = reply.body["choices"][0]["message"]["tool_calls"]
    assert json.loads(told["function"]["arguments"]) == {"a_longer_name_5": "123"}
    assert first.ask("POST", CHAT, body, **headers).body["choices"][0]["message"]["tool_calls"]
    with first.resume(reply.request_id) as whole:
        events = whole.rest()
    for index, event in enumerate(events[1:-2], start=1):
        with second.resume(reply.request_id, event.id) as rest:
            assert deltas_of(rest.rest()) == deltas_of(events[index + 1 :]), event


@pytest.mark.parametrize("is_stored", [True, False])
def test_so_have_those_of_a_response_wherever_it_is_read(
    start: Callable[..., GatewayThread], script: Any, is_stored: bool
) -> None:
    first, second = start(), start()
    call = "<arg_key>a_longer_name_5</arg_key><arg_value>123</arg_value></tool_call>"
    script.pieces = in_pieces(f"<tool_call>f79{call}")
    tools = [{"type": "function", **one["function"]} for one in many_functions()]
    body = {"input": "x", "tools": tools, "store": is_stored}
    reply = first.ask("POST", "/v1/responses", body, Idempotency_Key="many")
    (item,) = reply.body["output"]
    assert item["arguments"] == '{"a_longer_name_5": "123"}'
    again = second.ask("POST", "/v1/responses", body, Idempotency_Key="many")
    assert again.body["output"] == reply.body["output"]
    chat = second.get(f"/v1/requests/{reply.body['id']}")
    if not is_stored:
        assert chat.status == 404
        return
    assert second.get(f"/v1/responses/{reply.body['id']}").body["output"] == reply.body["output"]
    (told,) = chat.body["choices"][0]["message"]["tool_calls"]
    assert told["function"]["arguments"] == item["arguments"]


def test_more_types_than_can_be_kept_are_refused_by_name(gateway: GatewayThread) -> None:
    branches = [
        {"properties": {f"a{branch}{n}": {"type": "null"} for n in range(600)}} for branch in "ab"
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"allOf": branches}}}
    reply = gateway.ask("POST", CHAT, BODY | {"tools": [tool]})
    assert (reply.status, reply.error["param"]) == (400, "tools")
