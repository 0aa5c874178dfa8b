"""Responses in the background: polled, cancelled and deleted."""

import openai
import pytest

from service.gateway.responses import routes
from tests.service.builders import PATIENCE_SECONDS, eventually

PATH = "/v1/responses"


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """A cancellation waits for the worker as long as a busy machine needs."""
    monkeypatch.setattr(routes, "CANCEL_SECONDS", PATIENCE_SECONDS)


def test_a_background_response_is_polled_to_its_end(client, other, script):
    script.pieces = ["one ", None, "two"]
    created = client.responses.create(model="fake", input="hello", background=True)
    assert (created.status, created.output, created.background) == ("queued", [], True)
    eventually(
        lambda: other.responses.retrieve(created.id).status == "in_progress", "it is running"
    )
    script.release.set()
    eventually(lambda: other.responses.retrieve(created.id).status == "completed", "its end")
    assert other.responses.retrieve(created.id).output_text == "one two"


def test_a_retrieval_that_waits_answers_at_the_end(client, other, script):
    script.pieces = ["one ", None, "two"]
    created = client.responses.create(model="fake", input="hello", background=True)
    script.release.set()
    whole = other.responses.retrieve(created.id, extra_query={"wait": "true"})
    assert (whole.status, whole.output_text) == ("completed", "one two")


def test_who_leaves_a_background_stream_does_not_end_it(client, script):
    script.pieces = ["one ", None, "two"]
    stream = client.responses.create(model="fake", input="x", background=True, stream=True)
    response_id = next(stream).response.id
    stream.close()
    script.release.set()
    events = list(client.responses.retrieve(response_id, stream=True))
    assert events[-1].response.output_text == "one two"


def test_a_cancelled_response_keeps_what_it_has(client, other, script):
    script.pieces = ["one ", None, "two"]
    stream = client.responses.create(model="fake", input="x", background=True, stream=True)
    events = [next(stream) for _ in range(6)]
    assert events[-1].type == "response.output_text.delta"
    cancelled = other.responses.cancel(events[0].response.id)
    assert cancelled.status == "cancelled"
    assert (cancelled.output_text, cancelled.error) == ("one ", None)
    *_, last = stream
    assert (last.type, last.response) == ("response.incomplete", cancelled)
    assert other.responses.cancel(cancelled.id) == cancelled


def test_a_response_that_waits_is_cancelled_at_once(client, fake, script):
    fake.broker.pause("a test fills it")
    created = client.responses.create(model="fake", input="x", background=True)
    assert client.responses.cancel(created.id).status == "cancelled"
    assert client.responses.retrieve(created.id).usage.output_tokens == 0
    fake.broker.resume()


def test_a_completed_response_is_not_changed_by_a_cancellation(client):
    created = client.responses.create(model="fake", input="x")
    assert client.responses.cancel(created.id) == created


def test_a_deleted_response_is_gone_with_its_results(client, other, fake, gateway):
    created = client.responses.create(model="fake", input="x")
    assert gateway.ask("DELETE", f"{PATH}/{created.id}").body == {
        "id": created.id,
        "object": "response",
        "deleted": True,
    }
    for ask in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(created.id)
    assert not fake.connection.exists(*fake.broker.keys.of_request(created.id))
    assert client.responses.delete(client.responses.create(model="fake", input="x").id) is None


def test_a_running_response_is_cancelled_and_deleted(client, other, fake, script):
    script.pieces = ["one ", None, "two"]
    created = client.responses.create(model="fake", input="hello", background=True)
    eventually(lambda: other.responses.retrieve(created.id).status == "in_progress", "it runs")
    other.responses.delete(created.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(created.id)
    assert not fake.connection.exists(*fake.broker.keys.of_request(created.id))
