"""Adapters as OpenAI's callers ask for them: by the name of a model."""

import openai
import pytest

from tests.service.gateway.conftest import ADAPTERS


@pytest.fixture
def told(fake):
    """The worker says which adapters it has."""
    revisions = dict.fromkeys(ADAPTERS, "1")
    fake.broker.beat_worker("w", "ready", {}, model="fake", adapters=revisions)
    return fake


def test_a_model_is_listed_by_itself_and_with_each_of_its_adapters(gateway, told):
    listed = gateway.get("/v1/models").body
    assert [model["id"] for model in listed["data"]] == ["fake", "fake:polite", "fake:sql"]
    assert gateway.get("/v1/models/fake:sql").body["id"] == "fake:sql"
    assert gateway.get("/v1/models/fake:other").status == 404
    assert gateway.get("/v1/models/sql").status == 404


def test_an_answer_is_from_the_adapter_that_the_model_names(gateway, told):
    for options in ({"model": "fake:sql"}, {"model": "fake", "adapter": "sql"}, {"adapter": "sql"}):
        reply = gateway.complete(**options)
        assert (reply.status, reply.body["model"]) == (200, "fake:sql")
        assert reply.text_of_choice == "one two three"
    assert gateway.complete(model="fake").body["model"] == "fake"
    assert gateway.complete().body["model"] == "fake"
    assert [request.body.get("model") for request in told.requests] == [
        "fake:sql", "fake", None, "fake", None,
    ]  # fmt: skip


def test_a_stream_and_openais_own_client_take_such_a_name(gateway, told):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="unused") as client:
        assert client.models.retrieve("fake:polite").id == "fake:polite"
        chunks = list(client.completions.create(model="fake:polite", prompt="x", stream=True))
    assert {chunk.model for chunk in chunks} == {"fake:polite"}
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one two three"


def test_an_adapter_that_no_worker_has_is_a_model_that_there_is_not(gateway, told):
    reply = gateway.complete(model="fake:sqll")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert reply.error["message"] == (
        "this queue serves 'fake', not 'fake:sqll'; did you mean fake:sql?"
    )
    assert not told.requests


def test_what_the_worker_itself_refuses_is_told_by_what_was_asked(gateway, fake):
    """Nobody has said which adapters there are, or an old worker does not know of any."""
    reply = gateway.complete(adapter="other")
    assert (reply.status, reply.error["param"]) == (400, "adapter")
    fake.broker.beat_worker("w", "stopped", {}, model="fake")
    reply = gateway.complete(model="whatever:sql")
    assert (reply.status, reply.body["model"]) == (200, "whatever:sql")


@pytest.mark.parametrize("adapter", [5, "a:b", ["sql"], {"a": 1}])
def test_what_is_no_name_is_refused_by_its_field(gateway, told, adapter):
    reply = gateway.complete(adapter=adapter)
    assert (reply.status, reply.error["param"]) == (400, "adapter")


def test_a_model_whose_own_name_holds_a_colon_comes_first(gateway, told):
    told.broker.beat_worker("w2", "ready", {}, model="fake:sql")
    names = [model["id"] for model in gateway.get("/v1/models").body["data"]]
    assert names == ["fake", "fake:sql", "fake:polite"]


def test_one_key_with_another_adapter_is_another_call(gateway, told):
    key = {"Idempotency-Key": "k"}
    first = gateway.complete(model="fake:sql", headers=key)
    again = gateway.complete(model="fake:sql", headers=key)
    assert (first.status, again.request_id) == (200, first.request_id)
    for other in ({"model": "fake"}, {"model": "fake:polite"}, {"model": "fake", "adapter": "sql"}):
        reply = gateway.complete(**other, headers=key)
        assert (reply.status, reply.error["code"]) == (422, "idempotency_key_reused")
    assert len(told.requests) == 1
