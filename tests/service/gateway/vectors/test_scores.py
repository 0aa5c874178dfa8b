"""`/v1/score`, `/v1/rerank` and `/v1/classify`: what each answers, and what is refused."""

import json

import pytest

from quire.errors import InvalidRequest
from quire.testing.in_memory import Answer, FakeQuire
from quire.wire.pooling import MAX_INPUTS
from tests.service.gateway.builders import GatewayThread


def score(request):
    body = request.body
    if "bad" in (body["input"], body.get("pair")):
        raise InvalidRequest("body.input", "is bad")
    if "pair" in body:
        return Answer(vector=[len(body["pair"]) / 16])
    return Answer(vector=[0.25, 0.5, 0.25], label="neutral")


@pytest.fixture
def fake():
    with FakeQuire(answer=score) as fake:
        fake.broker.beat_worker("w", "ready", {"scores": 1.0}, model="fake")
        yield fake


@pytest.fixture
def gateway(fake):
    with GatewayThread(fake.async_client) as gateway:
        yield gateway


def ask(gateway, name, **body):
    return gateway.ask("POST", f"/v1/{name}", {"model": "fake"} | body)


@pytest.mark.parametrize(
    ("first", "second", "scores"),
    [
        ("a", "bb", [2 / 16]),
        ("a", ["bb", "c"], [2 / 16, 1 / 16]),
        (["a", "b"], ["c", "dd"], [1 / 16, 2 / 16]),
    ],
)
def test_a_pair_has_a_score(gateway, fake, first, second, scores):
    reply = ask(gateway, "score", text_1=first, text_2=second, use_activation=False)
    assert [one["score"] for one in reply.body["data"]] == scores
    assert [one["index"] for one in reply.body["data"]] == list(range(len(scores)))
    assert reply.body["object"] == "list" and reply.body["usage"]["prompt_tokens"] > 0
    assert {one.body["use_activation"] for one in fake.requests} == {False}
    assert gateway.get(f"/v1/requests/{reply.request_id}").body == reply.body


@pytest.mark.parametrize(("top_n", "order"), [(None, [1, 2, 0]), (2, [1, 2]), (0, [1, 2, 0])])
def test_documents_are_ranked(gateway, top_n, order):
    documents = ["a", "dddd", {"text": "cc"}]
    reply = ask(gateway, "rerank", query="q", documents=documents, top_n=top_n)
    assert [one["index"] for one in reply.body["results"]] == order
    assert reply.body["results"][0]["relevance_score"] == 4 / 16
    assert gateway.get(f"/v1/requests/{reply.request_id}").body == reply.body


def test_a_text_has_the_probability_of_each_class(gateway):
    reply = ask(gateway, "classify", input=["x", "y"])
    assert [one["probs"] for one in reply.body["data"]] == [[0.25, 0.5, 0.25]] * 2
    assert {one["num_classes"] for one in reply.body["data"]} == {3}
    assert {one["label"] for one in reply.body["data"]} == {"neutral"}


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("score", {"text_2": "b"}, "text_1"),
        ("score", {"text_1": "a", "text_2": []}, "text_2"),
        ("score", {"text_1": "a", "text_2": ["b", 1]}, "text_2.1"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("score", {"text_1": "a", "text_2": ["b"] * (MAX_INPUTS + 1)}, "text_2"),
        ("score", {"text_1": "a", "text_2": "b", "stream": True}, "stream"),
        ("score", {"text_1": "a", "text_2": "b", "use_activation": 1}, "use_activation"),
        ("rerank", {"query": "", "documents": ["a"]}, "query"),
        ("rerank", {"query": "q", "documents": "a"}, "documents"),
        ("rerank", {"query": "q", "documents": [{"title": "a"}]}, "documents.0"),
        ("rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
        (
            "rerank",
            {"query": "q", "documents": ["a"], "return_documents": True},
            "return_documents",
        ),
        ("rerank", {"query": "q", "docs": ["a"]}, "docs"),
        ("classify", {}, "input"),
        ("classify", {"input": ["a", ""]}, "input.1"),
        ("classify", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_a_wrong_body_is_refused_by_the_name_of_its_field(refused, name, body, param):
    reply = refused(f"/v1/{name}", {"model": "fake"} | body)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("score", {"text_1": "a", "text_2": ["b", "bad"]}, "text_2.1"),
        ("rerank", {"query": "q", "documents": ["bad", "b"]}, "documents.0"),
        ("classify", {"input": "bad"}, "input"),
    ],
)
def test_a_text_that_the_worker_refuses_is_named_as_the_caller_named_it(gateway, name, body, param):
    reply = ask(gateway, name, **body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_a_model_with_several_classes_gives_no_single_score():
    with (
        FakeQuire(answer=lambda _: Answer(vector=[0.5, 0.5])) as fake,
        GatewayThread(fake.async_client) as gateway,
    ):
        reply = ask(gateway, "rerank", query="q", documents=["a"])
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert "2 classes" in reply.error["message"]


def test_a_repeated_call_is_the_same_request_and_another_one_is_refused(gateway, fake):
    key = {"Idempotency-Key": "k"}
    body = {"model": "fake", "query": "q", "documents": ["a", "bb"]}
    first, again = (gateway.ask("POST", "/v1/rerank", body, **key) for _ in range(2))
    assert first.body == again.body and len(fake.requests) == 2
    for path, other in (
        ("rerank", body | {"top_n": 1}),
        ("score", {"model": "fake", "text_1": "q", "text_2": ["a", "bb"]}),
    ):
        assert gateway.ask("POST", f"/v1/{path}", other, **key).status == 422
    assert json.loads(first.text)["id"] == first.request_id
