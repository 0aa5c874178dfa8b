"""Prompts of tens of thousands of records in answers: decoded and sent in nobody's way."""

import asyncio
import threading

import pytest

from quire.wire import output
from service.gateway import answers, idempotency
from service.gateway.streaming import JOINED_BYTES, EventStream


@pytest.fixture
def bodies(monkeypatch):
    """What streams send, in the parts in which they do."""
    sent: list[bytes] = []
    plain = EventStream._send

    def send(self, body, send):
        sent.append(body)
        return plain(self, body, send)

    monkeypatch.setattr(EventStream, "_send", send)
    return sent


def test_a_long_prompt_is_sent_in_parts_of_one_event(gateway, bodies):
    with gateway.stream("x" * 5000, echo=True, logprobs=1, prompt_logprobs=1) as stream:
        first, *_ = stream.rest()
    assert len(first.choice["prompt_logprobs"]) == 5000
    assert len(first.choice["logprobs"]["tokens"]) == 5004
    assert len(bodies) > 20 and max(map(len, bodies)) < 1.5 * JOINED_BYTES


def test_of_many_choices_only_one_prompt_is_decoded_ahead_of_the_caller(fake, monkeypatch):
    """Or a caller who reads nothing holds a hundred times six megabytes."""
    decoded, most, consumed = 0, 0, 0
    plain = output.unpack_tokens

    def unpack(data):
        nonlocal decoded
        found = plain(data)
        decoded += bool(found.prompt)
        return found

    monkeypatch.setattr(output, "unpack_tokens", unpack)

    async def read():
        nonlocal most, consumed
        async with fake.async_client() as client:
            body = {"prompt": "hello", "n": 8, "prompt_logprobs": 1}
            call = idempotency.call_of("completions", body, tenant="t", key=None, model="fake")
            handles = await client.submit_many(await call.messages())
            for handle in handles:
                await handle.result()
            decoded_before = decoded
            answer = answers.Answer(client, call.record, closing=asyncio.Event())
            async for _, items in answer.updates(idle_seconds=9.0):
                for _ in range(100):
                    await asyncio.sleep(0)
                most = max(most, decoded - decoded_before - consumed)
                consumed += sum(1 for one in items if getattr(one, "prompt_tokens", ()))

    asyncio.run(read())
    assert (consumed, most) == (8, 1)


@pytest.mark.parametrize(("length", "is_elsewhere"), [(9000, True), (90, False)])
def test_a_long_prompt_is_not_decoded_in_the_event_loop(
    gateway, fake, monkeypatch, length, is_elsewhere
):
    threads, plain = [], output.unpack_tokens

    def unpack(data):
        found = plain(data)
        if found.prompt:
            threads.append(threading.current_thread().name)
        return found

    with gateway.stream("x" * length, prompt_logprobs=1) as stream:
        whole = stream.rest()
    monkeypatch.setattr(output, "unpack_tokens", unpack)
    with gateway.resume(stream.request_id) as again:
        assert [event.data for event in again.rest()] == [event.data for event in whole]
    assert [name.startswith("asyncio_") for name in threads] == [is_elsewhere]


def test_no_event_has_a_character_that_a_client_takes_for_the_end_of_a_line(gateway, bodies):
    with gateway.stream("a\u2028b\x85", echo=True, logprobs=1, prompt_logprobs=1) as stream:
        first, *_ = stream.rest()
    assert first.choice["logprobs"]["tokens"][:4] == list("a\u2028b\x85")
    assert all(body.isascii() for body in bodies)
