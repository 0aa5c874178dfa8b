"""A content of null reaches the chat template by every way in."""

import json
from typing import Any

import pytest

from quire.batch.lines import BatchLine, parse_line
from quire.openai.requests import OpenAIRequest
from quire.openai.responses.call import call_of
from quire.wire.arguments import build_request
from quire.wire.message import digest_of
from quire.wire.protocol import GenerationRequest

ASK = {"role": "user", "content": "Is it warm?"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAID = {"role": "assistant", "content": None, "tool_calls": [CALL]}
LEFT_OUT = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "31"}
REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "Hm."}]}
ITEMS = [
    ASK,
    REASONING,
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "31"},
]


def of_chat(messages: list[Any]) -> GenerationRequest:
    return (
        OpenAIRequest("chat.completions", {"messages": messages}, "0" * 64).message("a", 0).request
    )


def of_line(messages: list[Any]) -> GenerationRequest:
    line = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": messages}}
    parsed = parse_line(json.dumps(line), number=1, batch="b")
    assert isinstance(parsed, BatchLine), parsed
    return parsed.message().request


def of_client(messages: list[Any]) -> GenerationRequest:
    return build_request({"messages": messages}, tenant="t", now_ms=None)[0]


def contents(request: GenerationRequest) -> list[Any]:
    messages = GenerationRequest.decode(request.encode()).parse_body().messages
    assert messages is not None
    return [one["content"] for one in messages]


@pytest.mark.parametrize("way", [of_chat, of_line, of_client])
def test_null_crosses_the_wire(way: Any) -> None:
    assert contents(way([ASK, SAID, RESULT])) == ["Is it warm?", None, "31"]
    assert contents(way([ASK, LEFT_OUT, RESULT])) == ["Is it warm?", None, "31"]
    assert contents(way([ASK, SAID | {"content": ""}])) == ["Is it warm?", ""]
    assert contents(way([ASK, SAID | {"tool_calls": None}])) == ["Is it warm?", None]


@pytest.mark.parametrize("items", [ITEMS, [ITEMS[0], *ITEMS[2:]]])
def test_calls_of_a_response_without_a_text_have_null(items: list[Any]) -> None:
    chat = call_of({"input": items}, name="0" * 32).chat
    assert contents(of_chat(chat["messages"])) == ["Is it warm?", None, "31"]
    said = call_of({"input": [*items[:1], {"role": "assistant", "content": "So."}, *items[-2:]]},
                   name="0" * 32).chat  # fmt: skip
    assert contents(of_chat(said["messages"])) == ["Is it warm?", "So.", "31"]


def test_the_digest_of_a_chat_with_null_is_that_of_earlier_versions() -> None:
    """So a request that is sent again after an upgrade is the same."""
    null, empty = (of_client([ASK, SAID | {"content": one}]) for one in (None, ""))
    same = {"id": "a", "created_ms": 1}
    null, empty = (
        one.model_copy(update=same | {"body": one.body | {"seed": 1}}) for one in (null, empty)
    )
    assert digest_of(null) == digest_of(empty) != b""
