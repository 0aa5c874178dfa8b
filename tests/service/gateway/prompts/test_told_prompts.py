"""What is told of prompts and tokens: ids, bytes, offsets, usage; and of the engine at the end."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.batch.batch import run_batch
from quire.wire.output import TokenChunk
from tests.service.builders import Queue, WorkerThread, left_in_the_middle
from tests.service.fake_model import byte_tokenizer, render_chat
from tests.service.gateway.builders import GatewayThread, gateway_of
from tests.service.gateway.front import CHAT, COMPLETIONS, Stream

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
HELLO = [*map(ord, "hello")]
#: A stream whose events all have the usage.
ALWAYS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def events_of(stream: Any) -> list[dict[str, Any]]:
    return [json.loads(one.data) for one in stream.rest() if one.data not in ("", "[DONE]")]


def test_a_chat_has_the_ids_of_its_prompt_once(gateway: GatewayThread, fake: Any) -> None:
    asked = ASK | {"return_token_ids": True, "n": 2}
    reply = gateway.ask("POST", CHAT, asked)
    assert reply.body["prompt_token_ids"] == HELLO
    assert all("prompt_token_ids" not in one for one in reply.body["choices"])
    assert [one.body.get("return_token_ids") for one in fake.requests] == [True, None]
    with gateway.resume(reply.request_id) as stream:
        told = [one["prompt_token_ids"] for one in events_of(stream) if "prompt_token_ids" in one]
    assert told == [HELLO]
    assert "prompt_token_ids" not in gateway.ask("POST", CHAT, ASK).body


def test_each_choice_of_a_completion_has_the_ids_of_its_prompt(gateway: GatewayThread) -> None:
    asked = {"prompt": ["ab", "c"], "return_token_ids": True}
    expected = [[97, 98], [99]]
    reply = gateway.ask("POST", COMPLETIONS, asked)
    assert [one["prompt_token_ids"] for one in reply.body["choices"]] == expected
    with gateway.resume(reply.request_id) as stream:
        choices = [one["choices"][0] for one in events_of(stream)]
    told = {one["index"]: one["prompt_token_ids"] for one in choices if "prompt_token_ids" in one}
    assert told == dict(enumerate(expected))


def test_ids_of_prompts_count_before_anything_is_computed(
    gateway: GatewayThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.gateway.idempotency.MAX_COMPLETE_LOGPROBS", 5)
    asked = {"prompt": [[1, 2, 3], [4, 5, 6]], "return_token_ids": True}
    reply = gateway.ask("POST", COMPLETIONS, asked)
    assert (reply.status, reply.error["param"]) == (400, "return_token_ids")
    assert gateway.ask("POST", COMPLETIONS, asked | {"prompt": [[1, 2], [3, 4]]}).status == 200


def test_the_ids_stand_beside_the_log_probabilities_of_a_prompt(gateway: GatewayThread) -> None:
    asked = {"prompt": "hello", "return_token_ids": True, "prompt_logprobs": 0}
    (choice,) = gateway.ask("POST", COMPLETIONS, asked).body["choices"]
    assert choice["prompt_token_ids"] == HELLO and len(choice["prompt_logprobs"]) == len(HELLO)


def test_a_batch_has_them_as_the_gateway_has(queue: Queue, tmp_path: Path) -> None:
    body = ASK | {"return_token_ids": True, "max_tokens": 3, "seed": 0}
    line = {"custom_id": "a", "url": CHAT, "body": body}
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(line))
    expected = byte_tokenizer().encode(
        render_chat(ASK["messages"]), add_special_tokens=False
    ).ids  # fmt: skip
    with (
        WorkerThread(queue.settings()),
        gateway_of(queue) as gateway,
    ):
        reply = gateway.ask("POST", CHAT, body)
        run_batch(queue.url, source, output, queue=queue.name)
    for answer in (reply.body, json.loads(output.read_text())["response"]["body"]):
        assert answer["prompt_token_ids"] == expected
        assert answer["system_fingerprint"] == "fake-1"


def test_a_takeover_tells_the_prompt_once(queue: Queue) -> None:
    request_id = queue.submit("abc", kind="completions", max_tokens=40, return_token_ids=True)
    left_in_the_middle(queue, request_id)
    with WorkerThread(queue.settings()):
        queue.result(request_id)
    chunks = queue.broker.read_output({request_id: 0})[request_id].chunks
    told = [one.told_prompt for one in chunks if isinstance(one, TokenChunk)]
    expected = byte_tokenizer().encode("abc", add_special_tokens=True).ids
    assert told == [tuple(expected), *[()] * (len(told) - 1)]


def test_an_answer_names_the_engine_at_its_end(gateway: GatewayThread) -> None:
    for path, asked in ((CHAT, ASK), (COMPLETIONS, {"prompt": "x"})):
        reply = gateway.ask("POST", path, asked)
        assert reply.body["system_fingerprint"] == "fake"
        with gateway.resume(reply.request_id) as stream:
            *pieces, last = events_of(stream)
        assert last["system_fingerprint"] == "fake"
        assert not any("system_fingerprint" in one for one in pieces)


def test_each_event_has_the_usage_so_far(gateway: GatewayThread, script: Any) -> None:
    script.pieces = ["one ", "two ", "three"]
    with gateway.stream("hello", **ALWAYS) as stream:
        events = events_of(stream)
    seen = [one["usage"]["completion_tokens"] for one in events]
    assert seen == [4, 8, 13, 13, 13]
    for one in events:
        usage = one["usage"]
        assert usage["prompt_tokens"] == 5
        assert usage["total_tokens"] == 5 + usage["completion_tokens"]


def test_a_resumed_stream_knows_the_prompt(gateway: GatewayThread, script: Any) -> None:
    script.pieces = ["one ", "two ", "three"]
    with gateway.stream("hello", **ALWAYS) as stream:
        first = next(one for one in stream.rest() if one.data)
        request_id = stream.request_id
    query = "?include_usage=true&continuous_usage_stats=true"
    path = f"/v1/requests/{request_id}/events{query}"
    with Stream(gateway.send("GET", path, Last_Event_ID=first.id)) as again:
        usages = [one["usage"] for one in events_of(again)]
    assert [(one["prompt_tokens"], one["completion_tokens"]) for one in usages] == [
        (5, 8), (5, 13), (5, 13), (5, 13),
    ]  # fmt: skip


@pytest.mark.parametrize("options", [{"continuous_usage_stats": True}, {"include_usage": True}])
def test_without_both_options_events_have_no_usage(
    gateway: GatewayThread, options: dict[str, bool]
) -> None:
    with gateway.stream("hello", stream_options=options) as stream:
        *events, last = events_of(stream)
    assert not any(one.get("usage") for one in events)
    assert bool(last.get("usage")) is ("include_usage" in options)


def test_an_option_of_the_wrong_type_is_named(gateway: GatewayThread) -> None:
    for name in ("include_usage", "continuous_usage_stats"):
        asked = {"prompt": "x", "stream": True, "stream_options": {name: 1}}
        reply = gateway.ask("POST", COMPLETIONS, asked)
        assert (reply.status, reply.error["param"]) == (400, f"stream_options.{name}")


def test_tokens_of_parts_of_characters_are_told_by_bytes_and_place(queue: Queue) -> None:
    """The model of the test says random bytes, of which most are no characters alone."""
    asked = {"prompt": [5, 6, 7], "max_tokens": 60, "seed": 0, "logprobs": 3}
    with (
        WorkerThread(queue.settings()),
        gateway_of(queue) as gateway,
    ):
        (choice,) = gateway.ask("POST", COMPLETIONS, asked).body["choices"]
        chat = ASK | {"max_tokens": 60, "seed": 0, "logprobs": True, "top_logprobs": 3}
        (said,) = gateway.ask("POST", CHAT, chat).body["choices"]
    text, told = choice["text"], choice["logprobs"]
    offsets = told["text_offset"]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(text)
    for start, token in zip(offsets, told["tokens"], strict=True):
        # Bytes that became no character are told with the token after them.
        rest = text[start:].lstrip("\ufffd")
        assert token.startswith("bytes:") or rest.startswith(token)
    assert any(token.startswith("bytes:") for token in told["tokens"])
    # The token itself, and the likeliest ones: none has hidden another.
    assert all(len(one) in (3, 4) for one in told["top_logprobs"])
    content = said["logprobs"]["content"]
    whole = b"".join(bytes(one["bytes"]) for one in content)
    assert whole.decode(errors="replace") == said["message"]["content"]
