"""The mark of reasoning that a prompt has opened, across takeovers."""

import json
from pathlib import Path

import pytest

from quire.batch.batch import run_batch
from quire.client.client import Client
from quire.openai.tools.answers import message_of
from tests.service.builders import Queue, StepGate, WorkerThread, expected_tokens
from tests.service.fake_model import render_chat, text_of
from tests.service.test_chat_takeovers import plain_ids

#: The template of the fake model writes a line end after the message, and nothing else.
OPEN = [{"role": "user", "content": "1+1=<think>"}]
TEXT = text_of(expected_tokens(plain_ids(render_chat(OPEN)), max_tokens=60))


@pytest.mark.parametrize("num_published", [0, 1, 20])
def test_the_mark_is_published_once_with_the_first_token(queue: Queue, num_published: int) -> None:
    request_id = queue.submit(OPEN, kind="chat.completions", max_tokens=60)
    gate = StepGate(steps=0)
    with WorkerThread(queue.settings(drain_seconds=0.0), before_run=gate) as one:
        gate.step_until(lambda: queue.published(request_id) >= num_published)
        one.worker.stop()
        gate.step_until(lambda: one.has_ended)
    with WorkerThread(queue.settings()):
        assert queue.result(request_id).text == f"<think>{TEXT}"


def test_a_constrained_output_begins_without_it(queue: Queue) -> None:
    request_id = queue.submit(OPEN, kind="chat.completions", max_tokens=60, choice=["yes"])
    with WorkerThread(queue.settings()):
        assert queue.result(request_id).text == "yes"


def test_clients_and_batch_files_read_it_as_reasoning(queue: Queue, tmp_path: Path) -> None:
    line = {"custom_id": "a", "url": "/v1/chat/completions",
            "body": {"messages": OPEN, "max_tokens": 60, "seed": 0}}  # fmt: skip
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(line))
    with WorkerThread(queue.settings()), Client(queue.url, queue=queue.name) as client:
        handle = client.submit(messages=OPEN, sampling={"max_tokens": 60, "seed": 0})
        result = handle.result(timeout=30)
        run_batch(queue.url, source, output, queue=queue.name)
    message = message_of(result.request_id, 0, [], result.text)
    assert message == {"role": "assistant", "content": "", "reasoning_content": TEXT.strip()}
    body = json.loads(output.read_text())["response"]["body"]
    assert body["choices"][0]["message"] == message
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 60}
