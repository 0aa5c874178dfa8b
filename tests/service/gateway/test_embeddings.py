"""`/v1/embeddings`: OpenAI's client, both encodings, lists of inputs, and what is refused."""

import base64
import json
import struct

import openai
import pytest

from quire.batch.batch import run_batch
from quire.errors import InvalidRequest, RequestFailed
from quire.testing.in_memory import Answer, FakeQuire
from quire.wire.pooling import MAX_INPUTS
from tests.service.gateway.builders import GatewayThread


def numbers_for(given) -> list[float]:
    """A vector that tells its input: of a text its characters, of token ids the ids."""
    ids = [ord(one) for one in given] if isinstance(given, str) else given
    return [float(sum(ids)), float(len(ids)), 0.5]


def embed(request):
    if request.body["input"] == "bad":
        raise InvalidRequest("body.input", "is bad")
    return Answer(vector=numbers_for(request.body["input"])[: request.body.get("dimensions")])


@pytest.fixture
def fake():
    with FakeQuire(answer=embed) as fake:
        fake.broker.beat_worker("w", "ready", {"embeddings": 1.0}, model="fake")
        yield fake


@pytest.fixture
def gateway(fake):
    with GatewayThread(fake.async_client) as gateway:
        yield gateway


# Without a format, OpenAI's client asks for base64 and decodes it.
@pytest.mark.parametrize(("encoding", "number"), [({}, 150), ({"encoding_format": "float"}, 5)])
def test_openais_client_gets_vectors_in_the_order_of_the_inputs(client, encoding, number):
    texts = [f"text {index}" for index in range(number)]
    answer = client.embeddings.create(model="fake", input=texts, **encoding)
    assert [one.embedding for one in answer.data] == [numbers_for(text) for text in texts]
    assert [one.index for one in answer.data] == list(range(number))
    total = sum(map(len, texts))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (total, total)
    assert (answer.object, answer.model) == ("list", "fake")


@pytest.mark.parametrize(
    ("given", "each"), [("one", ["one"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])]
)
def test_an_input_is_a_text_token_ids_or_several(client, given, each):
    answer = client.embeddings.create(model="fake", input=given, encoding_format="float")
    assert [one.embedding for one in answer.data] == [numbers_for(one) for one in each]


def test_dimensions_and_prompts_reach_the_worker(client, fake):
    more = {"prompt_name": "query", "truncate_prompt_tokens": -1}
    answer = client.embeddings.create(model="fake", input="x", dimensions=2, extra_body=more)
    assert len(answer.data[0].embedding) == 2
    body = fake.requests[0].body
    assert body["prompt_name"] == "query" and body["truncate_prompt_tokens"] == -1
    assert "seed" not in body


def test_base64_is_the_vector_as_the_record_has_it_also_when_it_is_asked_for_again(gateway):
    body = {"model": "fake", "input": ["x", "y"], "encoding_format": "base64"}
    reply = gateway.ask("POST", "/v1/embeddings", body)
    assert reply.status == 200
    found = [base64.b64decode(one["embedding"]) for one in reply.body["data"]]
    assert found == [struct.pack("<3f", *numbers_for(text)) for text in ("x", "y")]
    again = gateway.get(f"/v1/requests/{reply.request_id}")
    assert again.body == reply.body


def test_a_repeated_call_is_the_same_request(gateway, fake):
    body = {"model": "fake", "input": ["x", "y"]}
    replies = [
        gateway.ask("POST", "/v1/embeddings", body, **{"Idempotency-Key": "k"}) for _ in range(2)
    ]
    assert replies[0].body == replies[1].body
    assert len(fake.requests) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x", ""]}, "input.1"),
        ({"input": ["x", [1]]}, "input"),
        ({"input": ["x"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "stream": True}, "stream"),
        ({"input": "x", "max_tokens": 3}, "max_tokens"),
        ({}, "input"),
    ],
)
def test_a_wrong_body_is_refused_by_the_name_of_its_field(refused, body, param):
    reply = refused("/v1/embeddings", {"model": "fake"} | body)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_an_input_that_the_worker_refuses_is_named_by_its_index(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="fake", input=["fine", "bad"])
    assert refused.value.param == "input.1"


def test_a_vector_has_no_events(gateway):
    reply = gateway.ask("POST", "/v1/embeddings", {"model": "fake", "input": "x"})
    assert gateway.get(f"/v1/requests/{reply.request_id}/events").status == 400


def test_the_list_of_models_says_what_a_model_makes(gateway):
    assert [one.get("kind") for one in gateway.get("/v1/models").body["data"]] == ["embeddings"]
    assert gateway.get("/v1/models/fake").body["kind"] == "embeddings"


def test_lines_of_a_batch_file_may_be_embeddings(fake, tmp_path):
    source = tmp_path / "in.jsonl"
    bodies = [{"input": ["a", "b"]}, {"input": "c", "encoding_format": "base64"}, {"input": "bad"}]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/embeddings", "body": body}
        for n, body in enumerate(bodies)
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    run_batch(fake.broker, source, tmp_path / "out.jsonl", name="b")
    found = {
        line["custom_id"]: line["response"]["body"]["data"]
        for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    }
    assert [one["embedding"] for one in found["0"]] == [numbers_for("a"), numbers_for("b")]
    assert base64.b64decode(found["1"][0]["embedding"]) == struct.pack("<3f", *numbers_for("c"))
    assert "2" not in found


def test_a_worker_that_fails_fails_the_call():
    def fail(request):
        raise RequestFailed("out_of_paper", "the tray is empty")

    with FakeQuire(answer=fail) as fake, GatewayThread(fake.async_client) as gateway:
        reply = gateway.ask("POST", "/v1/embeddings", {"input": ["x", "y"]})
    assert reply.status == 500 and reply.error["code"] == "out_of_paper"
