"""Chats and responses with pictures, over HTTP: what the queue gets, and what is refused."""

from typing import Any

import openai
import pytest

from tests.quire.picture_files import data_url, png, png_header, sha256
from tests.service.gateway.builders import GatewayThread, openai_client
from tests.service.gateway.front import CHAT

RED, BLUE = png(color=b"\xff\0\0"), png(color=b"\0\0\xff")
TEXT: dict[str, Any] = {"type": "text", "text": "What is it?"}


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def shown(data: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(data), "detail": "auto"}


@pytest.fixture
def client(gateway: GatewayThread):
    with openai_client(gateway.url) as made:
        yield made


def test_a_chat_with_a_picture_is_answered_and_its_request_is_small(client, fake):
    messages = [{"role": "user", "content": [TEXT, image(RED)]}]
    for n in (1, 2):
        answer = client.chat.completions.create(model="fake", messages=messages, n=n)
        assert len(answer.choices) == n
    for request in fake.requests:
        (message,) = request.body["messages"]
        assert message["content"] == [TEXT, {"type": "image", "sha256": sha256(RED)}]
    assert fake.broker.pictures([sha256(RED)]) == {sha256(RED): RED}


def test_a_repeated_call_is_the_same_request_and_another_picture_another(gateway, fake):
    body = {"messages": [{"role": "user", "content": [image(RED)]}]}
    other = {"messages": [{"role": "user", "content": [image(BLUE)]}]}
    first, again = (gateway.ask("POST", CHAT, body, Idempotency_Key="k") for _ in range(2))
    assert first.request_id == again.request_id and len(fake.requests) == 1
    refused = gateway.ask("POST", CHAT, other, Idempotency_Key="k")
    assert (refused.status, refused.error["code"]) == (422, "idempotency_key_reused")


@pytest.mark.parametrize(
    "part",
    [image(png_header(50_000, 50_000)), image(b"BM" + bytes(60)),
     {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}],
)  # fmt: skip
def test_a_hostile_picture_is_refused_before_anything_is_stored(gateway, fake, part):
    reply = gateway.ask("POST", CHAT, {"messages": [{"role": "user", "content": [TEXT, part]}]})
    assert (reply.status, reply.error["param"]) == (400, "messages.0.content.1.image_url.url")
    assert fake.requests == [] and fake.connection.keys("*:p:*") == []


def test_a_response_goes_on_with_the_pictures_of_those_before_it(client, fake):
    asked = [{"role": "user", "content": [{"type": "input_text", "text": "What?"}, shown(RED)]}]
    first = client.responses.create(model="fake", input=asked)
    (item,) = client.responses.input_items.list(first.id).data
    assert [part.type for part in item.content] == ["input_text", "input_image"]
    assert item.content[1].image_url is None
    more = [{"role": "user", "content": [shown(BLUE)]}]
    second = client.responses.create(model="fake", input=more, previous_response_id=first.id)
    client.responses.create(model="fake", input="And?", previous_response_id=second.id)
    parts = [message["content"] for message in fake.requests[-1].body["messages"]]
    assert parts[0][1] == {"type": "image", "sha256": sha256(RED)}
    assert parts[2] == [{"type": "image", "sha256": sha256(BLUE)}]
    fake.connection.delete(fake.broker.keys.picture(sha256(RED)))
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="fake", input="And?", previous_response_id=second.id)
    assert refused.value.param == "previous_response_id"
    assert "expired" in refused.value.message
