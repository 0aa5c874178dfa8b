"""The end of a gateway: what it refuses, what it lets end, and what it breaks off."""

import asyncio
import http.client
import json
from urllib.parse import urljoin

import pytest

from service.gateway.http.lifecycle import Lifecycle
from service.gateway.refusals import Refused
from tests.service.builders import eventually
from tests.service.gateway.front import CHAT, COMPLETIONS, text_of_events


def wait_until_draining(gateway):
    eventually(lambda: gateway.get("/readyz").status == 503, "the gateway drains")
    assert gateway.get("/readyz").body["reason"] == "this gateway drains"


def test_open_answers_go_on_and_new_calls_are_refused(gateway, script):
    script.pieces = ["one ", None, "two"]
    with gateway.stream() as stream:
        stream.read_tokens(4)
        gateway.stop()
        wait_until_draining(gateway)
        reply = gateway.complete()
        assert (reply.status, reply.error["code"]) == (503, "gateway_draining")
        assert "Retry-After" in reply.headers
        script.release.set()
        assert text_of_events(stream.rest()) == "two"
    gateway.join()


def is_closed(connection, *, path="/v1/completions", body='{"prompt": "x"}'):
    """Whether the connection serves no further call behind this one."""
    connection.request("POST" if body else "GET", path, body=body)
    response = connection.getresponse()
    response.read()
    return response.will_close


def test_a_gateway_that_drains_closes_every_connection_behind_its_answer(gateway, script):
    kept, other = gateway.send("GET", "/livez"), gateway.send("GET", "/livez")
    for connection in (kept, other):
        response = connection.getresponse()
        response.read()
        assert not response.will_close
    script.pieces = ["one ", None]
    with gateway.stream() as stream:
        stream.read_tokens(4)
        gateway.stop()
        wait_until_draining(gateway)
        assert is_closed(kept)
        # What it still answers would bring the caller back as well.
        assert is_closed(other, path="/v1/models", body=None)
        script.release.set()


def test_streams_that_remain_are_broken_off_and_go_on_elsewhere(start, fake, script):
    script.pieces = ["one ", None, "two"]
    first = start(drain_seconds=0.05)
    with first.stream() as stream:
        seen = stream.read_tokens(4)
        first.stop()
        (error,) = stream.rest()
    first.join()
    assert error.body["error"]["code"] == "gateway_draining"
    assert error.id == seen[-1].id
    # Without a key, too: it was not the caller who went.
    assert not fake.broker.status(stream.request_id).cancel_requested
    script.release.set()
    with start().resume(stream.request_id, error.id) as again:
        assert text_of_events(again.rest()) == "two"


def broken_off(gateway, fake, path, body, **headers):
    """What the caller of this is told by a gateway that ends before there is a word of it."""
    connection = gateway.send("POST", path, body, **headers)
    eventually(lambda: fake.requests, "the request runs")
    gateway.stop()
    response = connection.getresponse()
    told = response.status, response.headers, json.loads(response.read())["error"]["code"]
    connection.close()
    gateway.join()
    return told


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_broken_off_before_its_first_word_is_to_be_had_elsewhere(
    start, fake, script, patient_status, path, body, stream
):
    script.pieces = [None, "one"]
    body |= {"stream": stream}
    if stream:
        body |= {"stream_options": {"include_usage": True}}
    status, headers, code = broken_off(start(drain_seconds=0.0), fake, path, body)
    assert (status, code) == (303, "gateway_draining")
    assert "Retry-After" not in headers
    script.release.set()
    reply = start().get(urljoin(path, headers["Location"]))
    if stream:
        assert text_of_events(reply.events) == "one"
        assert reply.events[-2].body["usage"]["completion_tokens"] == 3
    else:
        assert reply.text_of_choice == "one"
    assert headers["X-Request-ID"] == fake.requests[0].id
    assert len(fake.requests) == 1


def test_who_has_a_key_is_told_to_call_again(start, fake, script):
    script.pieces = [None, "one"]
    key = {"Idempotency_Key": "k"}
    first = start(drain_seconds=0.0)
    status, headers, code = broken_off(first, fake, COMPLETIONS, {"prompt": "x"}, **key)
    assert (status, code) == (503, "gateway_draining")
    assert "Retry-After" in headers and "Location" not in headers
    script.release.set()
    assert start().complete(headers=key).text_of_choice == "one"
    assert len(fake.requests) == 1


def test_a_second_stop_does_not_wait(start, script):
    script.pieces = ["one ", None]
    gateway = start(drain_seconds=3600)
    with gateway.stream() as stream:
        stream.read_tokens(4)
        gateway.stop()
        wait_until_draining(gateway)
        gateway.stop()
        (error,) = stream.rest()
    assert error.body["error"]["code"] == "gateway_draining"
    gateway.join()


def test_when_it_has_ended_nobody_listens(gateway):
    gateway.stop()
    gateway.join()
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=1)
    with pytest.raises(ConnectionRefusedError):
        connection.request("GET", "/livez")


def test_a_life_lets_in_so_many_and_knows_when_nobody_is_left():
    async def live():
        lifecycle = Lifecycle(max_open=2)
        with lifecycle.admitted("one"), lifecycle.admitted("one"):
            with (
                pytest.raises(Refused, match="2 answers open, which is its limit"),
                lifecycle.admitted("other"),
            ):
                pass
            assert lifecycle.num_open == 2
            assert not await lifecycle.until_idle(0)
        assert await lifecycle.until_idle(0)
        lifecycle.drain()
        with pytest.raises(Refused, match="is shutting down"), lifecycle.admitted("one"):
            pass

    asyncio.run(live())


def test_a_life_gives_each_tenant_its_share_and_gets_every_place_back():
    async def live():
        lifecycle = Lifecycle(max_open=4, max_open_per_tenant=2)
        for _ in range(3):
            with lifecycle.admitted("one"), lifecycle.admitted("one"), lifecycle.admitted("other"):
                with pytest.raises(Refused, match="'one' has 2 answers"), lifecycle.admitted("one"):
                    pass
                with lifecycle.admitted("other"):
                    assert lifecycle.num_open == 4
        assert (lifecycle.num_open, lifecycle._open_of) == (0, {})

    asyncio.run(live())
