"""Which adapter a body asks for, in our words and in those of OpenAI's callers."""

from typing import Any

import msgpack
import pytest

from quire import RequestFailed
from quire.batch.lines import BadLine, BatchLine, parse_line
from quire.errors import InvalidRequest
from quire.keys import Keys
from quire.queue.workers.workers import worker_of
from quire.testing.in_memory import FakeQuire
from quire.wire.adapters import Adapter, adapter_of, name_with
from quire.wire.protocol import GenerationRequest, Kind
from quire.wire.sampling import parse_body

KINDS: dict[Kind, dict[str, Any]] = {
    "tokens": {"prompt": [1]},
    "completions": {"prompt": "a"},
    "chat.completions": {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_of_every_kind_may_name_an_adapter(kind):
    body = KINDS[kind] | {"adapter": "sql-2.1_b"}
    read = GenerationRequest.decode(GenerationRequest(kind=kind, body=body).encode())
    assert read.parse_body().adapter == "sql-2.1_b"
    assert parse_body(kind, KINDS[kind]).adapter is None
    assert parse_body(kind, KINDS[kind] | {"adapter": None}).adapter is None


@pytest.mark.parametrize("name", ["", "a:b", "a b", "a/b", "x" * 65, "a\n", 5, True, ["a"], {}])
def test_what_is_no_name_is_refused_by_its_field_before_anything_is_sent(name):
    with pytest.raises(InvalidRequest) as caught:
        parse_body("tokens", {"prompt": [1], "adapter": name})
    assert caught.value.field == "body.adapter"


ASKED: dict[str, tuple[dict[str, Any], Adapter | None]] = {
    "nothing": ({}, None),
    "the model": ({"model": "m"}, None),
    "an adapter": ({"adapter": "a"}, Adapter("a", "body.adapter")),
    "both": ({"model": "m", "adapter": "a"}, Adapter("a", "body.adapter")),
    "OpenAI's way": ({"model": "m:a"}, Adapter("a", "body.model")),
    "twice the same": ({"model": "m:a", "adapter": "a"}, Adapter("a", "body.model")),
}


@pytest.mark.parametrize(("body", "wanted"), ASKED.values(), ids=ASKED)
def test_whoever_serves_a_model_reads_which_adapter_of_it_is_asked_for(body, wanted):
    assert adapter_of(body, model="m") == wanted


@pytest.mark.parametrize("model", ["llama3:8b", ":", "a:", ":a", "a:b:c"])
def test_a_model_whose_own_name_holds_a_colon_comes_first(model):
    assert adapter_of({"model": model}, model=model) is None
    full = name_with(model, "8b")
    assert adapter_of({"model": full}, model=model) == Adapter("8b", "body.model")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model": "n"}, "body.model"),
    "another model and an adapter": ({"model": "n", "adapter": "a"}, "body.model"),
    "an adapter of another model": ({"model": "n:a"}, "body.model"),
    "no adapter behind the colon": ({"model": "m:"}, "body.model"),
    "no name behind the colon": ({"model": "m:a b"}, "body.model"),
    "two colons": ({"model": "m:a:b"}, "body.model"),
    "two adapters": ({"model": "m:a", "adapter": "b"}, "body.adapter"),
    "no name": ({"model": "m", "adapter": "a:b"}, "body.adapter"),
}


@pytest.mark.parametrize(("body", "field"), REFUSED.values(), ids=REFUSED)
def test_what_whoever_serves_a_model_cannot_mean_is_refused_by_its_field(body, field):
    with pytest.raises(InvalidRequest) as caught:
        adapter_of(body, model="m")
    assert caught.value.field == field


def test_a_missing_adapter_is_named_with_the_nearest_one_there_is():
    error = Adapter("shuot", "body.model").refusal(["shout", "sql"])
    assert str(error) == "body.model: this worker has no adapter 'shuot'; did you mean shout?"
    assert str(Adapter("a", "body.adapter").refusal([])) == (
        "body.adapter: this worker has no adapter 'a'"
    )


def line(number: int = 1, **body: Any) -> BatchLine | BadLine:
    text = (
        '{"custom_id": "a", "url": "/v1/completions", "body": '
        + str({"prompt": "x"} | body).replace("'", '"')
        + "}"
    )
    return parse_line(text, number=number, batch="b")


def test_a_line_of_a_batch_with_another_adapter_is_another_request():
    lines = [line(), line(model="m"), line(model="m:a"), line(model="m:b"), line(adapter="a")]
    assert len({one.request_id() for one in lines if isinstance(one, BatchLine)}) == 5
    bad = line(adapter="a:b")
    assert isinstance(bad, BadLine) and "body.adapter" in bad.message


def test_the_fake_worker_has_the_adapters_it_is_given_and_refuses_others():
    def answer(request: GenerationRequest) -> str:
        return str(request.body.get("adapter") or request.body.get("model"))

    with FakeQuire(answer=answer, adapters=["sql"]) as fake:
        client = fake.client()
        asked: tuple[dict[str, Any], ...] = (
            {}, {"adapter": "sql"}, {"model": "any:sql"}, {"model": "llama:8b"},
        )  # fmt: skip
        ends = [client.submit("x", **options).result(timeout=10) for options in asked]
        assert [(end.text, end.model) for end in ends] == [
            ("None", "fake"), ("sql", "fake:sql"), ("any:sql", "fake:sql"), ("llama:8b", "fake"),
        ]  # fmt: skip
        with pytest.raises(RequestFailed) as caught:
            client.submit("x", adapter="sqll").result(timeout=10)
    assert (caught.value.code, caught.value.field) == ("invalid_request", "body.adapter")
    assert caught.value.message == "this worker has no adapter 'sqll'; did you mean sql?"


def test_a_fake_worker_without_adapters_refuses_all():
    with FakeQuire(answer=lambda _: "x") as fake, pytest.raises(RequestFailed) as caught:
        fake.client().submit("x", adapter="sql").result(timeout=10)
    assert caught.value.field == "body.adapter"


def registered(load: dict[str, Any]) -> bytes:
    return b"1000 ready " + msgpack.packb(load)


def test_what_a_later_worker_tells_of_itself_hides_no_number_of_it():
    load = {"claims": 1, "model": "m", "adapters": {"a": 7}, "parts": {"b": [1]}, "mood": "good"}
    info = worker_of(b"w", registered(load), now_ms=1000)
    assert (info.load, info.model, info.adapters) == ({"claims": 1}, "m", {"a": "7"})


def test_a_worker_that_has_none_writes_what_it_always_did(broker, connection):
    broker.beat_worker("w", "ready", {"claims": 1.0}, model="m")
    (value,) = connection.hgetall(Keys(broker.keys.queue).workers).values()
    assert msgpack.unpackb(value.split(b" ", 2)[2]) == {"claims": 1.0, "model": "m"}
