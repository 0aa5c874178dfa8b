"""A gateway in front of a real worker: what it shows of prompts is what the engine found."""

from collections.abc import Iterator

import pytest

from quire.client.client_async import AsyncClient
from tests.service.builders import Queue, WorkerThread
from tests.service.fake_model import BOS_ID, byte_tokenizer, expected_prompt_tokens
from tests.service.gateway.builders import GatewayThread
from tests.service.gateway.front import CHAT

#: The second character has three tokens.
TEXT = "a\u4f60b"
IDS = byte_tokenizer().encode(TEXT, add_special_tokens=False).ids


@pytest.fixture
def gateway(queue: Queue) -> Iterator[GatewayThread]:
    def make_client() -> AsyncClient:
        return AsyncClient(queue.url, queue=queue.name)

    with WorkerThread(queue.settings()), GatewayThread(make_client) as gateway:
        yield gateway


def numbers_of(prompt: list[int]) -> list[float | None]:
    return [one.logprob for one in expected_prompt_tokens(prompt, number=1)]


def test_a_harness_gets_the_likelihoods_that_the_engine_computed(gateway: GatewayThread) -> None:
    prompts = [[7, 8, 9, 10], IDS]
    fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = gateway.complete(prompts, **fields).body["choices"]
    told = [choice["logprobs"]["token_logprobs"][:-1] for choice in choices]
    assert told == [numbers_of(prompt) for prompt in prompts]
    assert all(len(choice["logprobs"]["tokens"]) == len(prompt) + 1
               for choice, prompt in zip(choices, prompts, strict=True))  # fmt: skip


def test_a_character_in_several_tokens_is_whole(gateway: GatewayThread) -> None:
    none = {"echo": True, "max_tokens": 0, "logprobs": 0}
    (of_text,) = gateway.complete(TEXT, **none).body["choices"]
    (of_ids,) = gateway.complete(IDS, **none).body["choices"]
    assert of_text["text"] == of_ids["text"] == TEXT == "a\u4f60b"
    parts = [r"bytes:\xe4", r"bytes:\xbd", r"bytes:\xa0"]
    assert of_ids["logprobs"]["tokens"] == ["a", *parts, "b"]
    assert of_ids["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]
    # The worker begins a text with a token of its own.
    assert of_text["logprobs"]["tokens"][1:] == of_ids["logprobs"]["tokens"]
    assert of_text["logprobs"]["token_logprobs"] == numbers_of([BOS_ID, *IDS])


def test_a_chat_has_the_tokens_that_its_template_made(gateway: GatewayThread) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = gateway.ask("POST", CHAT, {"messages": messages, "prompt_logprobs": 0}).body
    first, *others = body["prompt_logprobs"]
    texts = [one["decoded_token"] for ranked in others for one in ranked.values()]
    assert first is None and "".join(texts).endswith("ser:hi\n")
    assert len(others) + 1 == body["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20}, "echo")],
)
def test_the_worker_refuses_too_long_a_text_in_the_name_of_the_callers_field(
    gateway: GatewayThread, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], param: str
) -> None:
    monkeypatch.setattr("quire.wire.logprobs.MAX_PROMPT_LOGPROBS", 21 * 10)
    assert gateway.complete("x" * 9, max_tokens=1, **fields).status == 200
    reply = gateway.complete("x" * 10, max_tokens=1, **fields)
    assert (reply.status, reply.error["param"]) == (400, param)
