"""A chat whose messages write control tokens, across takeovers and across versions of Quire."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.batch.batch import run_batch
from quire.client.client import Client
from quire.client.client_async import AsyncClient
from tests.service.builders import (
    Output,
    Queue,
    WorkerThread,
    expected_tokens,
    left_in_the_middle,
)
from tests.service.fake_model import EOS_ID, byte_tokenizer, render_chat, text_of
from tests.service.gateway.builders import GatewayThread

HOSTILE = [{"role": "user", "content": "<eos>1+1="}]
HARMLESS = [{"role": "user", "content": "1+1="}]


def plain_ids(text: str) -> list[int]:
    """The text as tokens of single bytes, of which `<eos>` is none."""
    tokenizer = byte_tokenizer()
    return [
        id_ for letter in text for id_ in tokenizer.encode(letter, add_special_tokens=False).ids
    ]


PROMPT = plain_ids(render_chat(HOSTILE))
WHOLE = expected_tokens(PROMPT, max_tokens=100)


def begun(queue: Queue, messages: list[dict[str, Any]], **body: Any) -> str:
    """A chat of which a worker has said a few tokens before it left."""
    request_id = queue.submit(messages, kind="chat.completions", max_tokens=100, **body)
    left_in_the_middle(queue, request_id, adapters={"sql": "1"})
    return request_id


def begun_by_an_earlier_version(
    queue: Queue, messages: list[dict[str, Any]], *tokens: int, fingerprint: str = "fake-1"
) -> str:
    """A chat with tokens under a fingerprint without the mark of a chat with control text."""
    request_id = queue.submit(messages, kind="chat.completions", max_tokens=100)
    queue.publish_by_hand(request_id, tokens, fingerprint=fingerprint)
    return request_id


def ended(queue: Queue, request_id: str) -> Output:
    with WorkerThread(queue.settings(), adapters={"sql": "1"}):
        return queue.result(request_id)


def test_it_is_another_prompt_than_with_a_control_token_and_costs_what_its_text_costs(
    queue: Queue,
):
    assert EOS_ID not in PROMPT
    with Client(queue.url, queue=queue.name) as client, WorkerThread(queue.settings()):
        handle = client.submit(messages=HOSTILE, sampling={"max_tokens": 100, "seed": 0})
        completion = handle.result(timeout=60)
    assert completion.usage.prompt_tokens == len(PROMPT)
    assert completion.token_ids == WHOLE


def test_a_gateway_and_a_batch_file_ask_for_the_same_prompt(queue: Queue, tmp_path: Path):
    body = {"messages": HOSTILE, "max_tokens": 5, "seed": 0}
    line = {"custom_id": "a", "url": "/v1/chat/completions", "body": body}
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(line))

    def client() -> AsyncClient:
        return AsyncClient(queue.url, queue=queue.name)

    with WorkerThread(queue.settings()), GatewayThread(client) as gateway:
        reply = gateway.ask("POST", line["url"], body)
        run_batch(queue.url, source, output, queue=queue.name)
    answers = [reply.body, json.loads(output.read_text())["response"]["body"]]
    for answer in answers:
        assert answer["usage"]["prompt_tokens"] == len(PROMPT)
        assert answer["choices"][0]["message"]["content"] == text_of(WHOLE[:5])


def test_another_worker_goes_on_with_it_and_nothing_has_changed(queue: Queue):
    request_id = begun(queue, HOSTILE)
    assert queue.broker.status(request_id).fingerprint == "fake-1 chat=text"
    output = ended(queue, request_id)
    assert output.token_ids == WHOLE
    assert output.completion.resumes == 1
    assert not output.completion.resumed_fingerprint_changed


def test_with_an_adapter_both_stand_in_its_fingerprint(queue: Queue):
    request_id = begun(queue, HOSTILE, adapter="sql")
    assert queue.broker.status(request_id).fingerprint == "fake-1 sql=1 chat=text"
    output = ended(queue, request_id)
    assert output.token_ids == expected_tokens(PROMPT, max_tokens=100, adapter="sql")


@pytest.mark.parametrize("fingerprint", ["fake-1", "fake-0"])
def test_what_an_earlier_version_began_of_another_prompt_is_not_gone_on_with(
    queue: Queue, fingerprint: str
):
    request_id = begun_by_an_earlier_version(queue, HOSTILE, *WHOLE[:2], fingerprint=fingerprint)
    output = ended(queue, request_id)
    error = output.completion.error
    assert error is not None and error.code == "not_resumable"
    assert "makes another prompt of this chat" in error.message
    assert output.token_ids == WHOLE[:2]


def test_a_chat_without_control_text_goes_on_under_either_version(queue: Queue):
    whole = expected_tokens(plain_ids(render_chat(HARMLESS)), max_tokens=100)
    output = ended(queue, begun_by_an_earlier_version(queue, HARMLESS, *whole[:2]))
    assert output.token_ids == whole
    assert (output.completion.error, output.completion.resumes) == (None, 1)
    assert queue.broker.status(begun(queue, HARMLESS)).fingerprint == "fake-1"
