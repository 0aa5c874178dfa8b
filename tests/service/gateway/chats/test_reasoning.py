"""Reasoning over HTTP: apart from the content, whole, as a stream, and as one that goes on."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.service.gateway.builders import GatewayThread, openai_client
from tests.service.gateway.chats.test_tool_calls import (
    BODY,
    CALLS,
    OUTPUT,
    deltas_of,
    in_pieces,
    told,
)
from tests.service.gateway.front import CHAT

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Is it warm in Rome?"}]}
THOUGHT = "I need to ask,\nand <tool_call> is the way."
REASONED = f"<think>\n{THOUGHT}\n</think>\n\n{OUTPUT}"


@pytest.fixture(autouse=True)
def _reasons(script: Any) -> None:
    script.pieces = in_pieces(REASONED)


def test_a_whole_answer_has_reasoning_content_and_calls(gateway: GatewayThread) -> None:
    with openai_client(gateway.url) as client:
        reply = client.chat.completions.create(model="fake", **BODY)
    message = reply.choices[0].message
    assert message.reasoning_content == THOUGHT
    assert message.content == "I shall ask."
    assert told(message.tool_calls) == CALLS
    # The fake model's tokens are characters.
    num_tokens = REASONED.index("</think>") + len("</think>")
    assert reply.usage.completion_tokens_details.reasoning_tokens == num_tokens
    assert reply.usage.completion_tokens == len(REASONED)


def test_a_stream_comes_to_the_same_and_counts_the_same(gateway: GatewayThread) -> None:
    whole = gateway.ask("POST", CHAT, BODY).body
    streamed = BODY | {"stream": True, "stream_options": {"include_usage": True}}
    *events, usage, _ = gateway.ask("POST", CHAT, streamed).events
    deltas = deltas_of(events)
    assert "".join(one.get("reasoning_content", "") for one in deltas) == THOUGHT
    assert "".join(one.get("content", "") for one in deltas) == "I shall ask."
    assert usage.body["usage"] == whole["usage"]


def test_a_stream_cut_at_any_event_goes_on_with_the_same_deltas_and_usage(
    start: Callable[..., GatewayThread],
) -> None:
    first, second = start(), start()
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
    events = first.ask("POST", CHAT, body).events
    request_id = events[0].body["id"]
    path = f"/v1/requests/{request_id}/events?include_usage=true"
    num_with_thought = sum("reasoning_content" in one for one in deltas_of(events[:-2]))
    assert num_with_thought > 5
    for index, event in enumerate(events[1:-2], start=1):
        again = second.ask("GET", path, Last_Event_ID=event.id).events
        rest = events[index + 1 :]
        assert [one.data for one in again] == [one.data for one in rest], event


def test_reasoning_can_be_left_out(gateway: GatewayThread) -> None:
    body = BODY | {"include_reasoning": False}
    reply = gateway.ask("POST", CHAT, body).body
    message = reply["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"] == "I shall ask."
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > len(THOUGHT)
    streamed = gateway.ask("POST", CHAT, body | {"stream": True}).events
    assert not [one for one in deltas_of(streamed) if "reasoning_content" in one]


def test_a_gateway_can_tell_no_reasoning_apart(start: Callable[..., GatewayThread]) -> None:
    off, other = start(reasoning="none"), start(reasoning="mistral")
    for gateway in (off, other):
        reply = gateway.ask("POST", CHAT, ASK)
        assert reply.text_of_choice == REASONED
        # Another gateway with another setting shows the same answer.
        again = start().get(f"/v1/requests/{reply.request_id}")
        assert again.text_of_choice == REASONED


def test_a_prompt_of_completions_has_no_reasoning(gateway: GatewayThread) -> None:
    assert gateway.complete().text_of_choice == REASONED


def test_reasoning_of_earlier_turns_reaches_the_template(gateway: GatewayThread, fake: Any) -> None:
    for name in ("reasoning_content", "reasoning"):
        said = {"role": "assistant", "content": "Yes.", name: "Why not."}
        body = {"messages": [*ASK["messages"], said, *ASK["messages"]]}
        assert gateway.ask("POST", CHAT, body).status == 200
        parsed = fake.requests[-1].parse_body()
        assert parsed.messages[1]["reasoning_content"] == "Why not."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"include_reasoning": "no"}, "include_reasoning"),
        ({"messages": [{"role": "assistant", "content": "", "reasoning": 1}]},
         "messages.0.reasoning"),
        ({"messages": [{"role": "assistant", "content": "", "reasoning_content": []}]},
         "messages.0.reasoning_content"),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused_by_their_path(
    gateway: GatewayThread, fields: dict[str, Any], param: str
) -> None:
    reply = gateway.ask("POST", CHAT, ASK | fields)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_the_record_of_an_earlier_version_has_no_reasoning(
    gateway: GatewayThread, fake: Any
) -> None:
    """Its callers have read the marks as content, and go on with content."""
    request_id = gateway.ask("POST", CHAT, ASK).request_id
    fields = json.loads(json.dumps(fake.requests[-1].metadata))
    del fields["openai"]["reasoning"]
    old = fake.requests[-1].model_copy(update={"id": "req-" + "0" * 32, "metadata": fields})
    fake.client().submit_many([old])
    assert gateway.get(f"/v1/requests/{old.id}").text_of_choice == REASONED
    assert gateway.get(f"/v1/requests/{request_id}").text_of_choice == OUTPUT
