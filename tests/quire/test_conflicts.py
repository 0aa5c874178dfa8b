"""A submit that is said again joins its request; another one under the same id is refused."""

import pickle

import pytest

from quire import Client, InvalidRequest, QuireError, RequestConflict, SamplingParams, State
from quire.conflicts import MAX_LOOKS
from quire.protocol import GenerationRequest
from quire.wire import pack, unpack_map
from tests.quire.builders import claim_next, make_item, make_request

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}}

#: Two calls each, under one id, that ask the same in other words; what is drawn differs in all.
SAME = {
    "again": ({"prompt": "x"}, {"prompt": "x"}),
    "with its seed": ({"prompt": "x", "sampling": {"seed": 7}}, {"prompt": "x"}),
    "an object": (
        {"prompt": [1, 2], "sampling": {"temperature": 0, "stop": "a"}},
        {"prompt": (1, 2), "sampling": SamplingParams(temperature=0.0, stop=("a",))},
    ),
    "a schema of tuples": (
        {"prompt": "x", "sampling": {"json_schema": SCHEMA | {"required": ["a"]}}},
        {"prompt": "x", "sampling": {"json_schema": SCHEMA | {"required": ("a",)}}},
    ),
    "a conversation": (
        {"messages": [{"role": "user", "content": "x"}]},
        {"messages": ({"content": "x", "role": "user"},)},
    ),
    "how it is treated": (
        {"prompt": "x", "priority": "low"},
        {
            "prompt": "x", "priority": "high", "deadline": 60, "delay_seconds": 5,
            "metadata": {"row": 2}, "headers": {"traceparent": "-"},
        },
    ),
}  # fmt: skip

#: The same, of bodies as other producers write them.
SAME_BODIES = {
    "defaults": ({"prompt": "x"}, {"prompt": "x", "max_tokens": 256, "top_k": -1, "n": 1}),
    "nulls": ({"prompt": "x"}, {"prompt": "x", "stop": None, "seed": None, "model": None}),
    "how it is told": ({"prompt": "x"}, {"prompt": "x", "stream": True, "user": "me"}),
    "an alias": (
        {"prompt": "x", "max_tokens": 3},
        {"prompt": "x", "max_completion_tokens": 3},
    ),
    "a format": (
        {"prompt": "x", "json_schema": SCHEMA},
        {
            "prompt": "x",
            "response_format": {
                "type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}
            },
        },
    ),
}  # fmt: skip

#: Two calls each that ask for something else.
OTHER = {
    "prompt": ({"prompt": "x"}, {"prompt": "y"}),
    "ids": ({"prompt": [1, 2]}, {"prompt": [1, 3]}),
    "conversation": (
        {"prompt": "x"},
        {"messages": [{"role": "user", "content": "x"}]},
    ),
    "length": ({"prompt": "x"}, {"prompt": "x", "sampling": {"max_tokens": 3}}),
    "seed": (
        {"prompt": "x", "sampling": {"seed": 7}},
        {"prompt": "x", "sampling": SamplingParams(seed=8)},
    ),
    "a seed now": ({"prompt": "x"}, {"prompt": "x", "sampling": {"seed": 8}}),
    "constraint": ({"prompt": "x"}, {"prompt": "x", "sampling": {"choice": ["a"]}}),
    "model": ({"prompt": "x", "model": "m"}, {"prompt": "x", "model": "n"}),
    "adapter": ({"prompt": "x"}, {"prompt": "x", "adapter": "sql"}),
    "tenant": ({"prompt": "x"}, {"prompt": "x", "tenant": "gold"}),
}


@pytest.fixture
def client(broker):
    return Client(broker)


def finish(broker):
    broker.commit([make_item(claim_next(broker).claim, 0, 2, final=True)])


@pytest.mark.parametrize(("first", "again"), SAME.values(), ids=SAME)
def test_a_submit_that_is_said_again_joins_its_request(client, broker, first, again):
    handle = client.submit(**first, request_id="a")
    assert client.submit(**again, request_id="a").request_id == handle.request_id
    claim_next(broker)
    assert client.submit(**again, request_id="a").status().state is State.RUNNING


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("pair", SAME_BODIES.values(), ids=SAME_BODIES)
def test_another_spelling_of_the_same_body_joins_its_request(client, pair, turned):
    for body in reversed(pair) if turned else pair:
        client.submit_many([make_request(id="a", kind="completions", body=body)])


@pytest.mark.parametrize(("first", "other"), OTHER.values(), ids=OTHER)
def test_another_request_under_a_known_id_is_refused_by_that_id(client, broker, first, other):
    client.submit(**first, request_id="a")
    for _ in range(2):
        with pytest.raises(RequestConflict, match=r"^request_id: a is there already") as caught:
            client.submit(**other, request_id="a")
        assert (caught.value.request_id, caught.value.index) == ("a", None)
        assert isinstance(caught.value, InvalidRequest)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again)) == (RequestConflict, str(caught.value))
        client.submit(**first, request_id="a")
        if broker.status("a").state is State.QUEUED:
            claim_next(broker)
    assert broker.status("a").state is State.RUNNING


def test_one_of_many_is_refused_by_its_place_and_the_others_are_there(client, broker):
    client.submit("x", request_id="b")
    rows = [{"prompt": "y", "request_id": name} for name in ("a", "b", "c")]
    with pytest.raises(RequestConflict, match=r"^request 1: request_id: b is") as caught:
        client.submit_many(rows)
    assert (caught.value.request_id, caught.value.index) == ("b", 1)
    assert [client.attach(name).status().state for name in "abc"] == [State.QUEUED] * 3
    with pytest.raises(RequestConflict, match="request 1: request_id: g~one"):
        client.submit_many([{"prompt": text, "request_id": "one"} for text in "xy"], group="g")


def test_choices_are_joined_again_and_other_ones_refused(client):
    first = client.submit_choices("x", n=3, request_id="a")
    again = client.submit_choices("x", n=3, request_id="a")
    assert [one.request_id for one in again] == [one.request_id for one in first]
    with pytest.raises(RequestConflict, match="a:0 is there"):
        client.submit_choices("y", n=3, request_id="a")


def test_of_many_that_are_said_again_the_last_is_looked_at_as_well(client):
    rows = [{"prompt": "x", "request_id": f"r-{number}"} for number in range(MAX_LOOKS + 2)]
    client.submit_many(rows)
    client.submit_many(rows)
    with pytest.raises(RequestConflict, match=f"^request {MAX_LOOKS + 1}: "):
        client.submit_many([*rows[:-1], rows[-1] | {"prompt": "y"}])


def test_what_a_request_that_has_ended_asked_is_not_known_and_its_end_is_given(client, broker):
    client.submit("x", request_id="a")
    finish(broker)
    for prompt in "xy":
        assert client.submit(prompt, request_id="a").status().state is State.COMPLETED


def test_an_idempotency_key_means_the_request_that_had_it_first(client):
    first = client.submit("x", idempotency_key="k")
    assert client.submit("y", idempotency_key="k").request_id == first.request_id


def test_so_it_does_where_the_id_is_made_of_the_key(connection, broker):
    client = Client(connection, queue=broker.keys.queue, shards=3)
    first = client.submit("x", idempotency_key="k")
    assert client.submit("y", idempotency_key="k").request_id == first.request_id


def newer(data):
    return pack(unpack_map(data) | {"v": 2})


def unknown_field(data):
    fields = unpack_map(data)
    return pack(fields | {"body": fields["body"] | {"mirostat": 2}})


@pytest.mark.parametrize("change", [newer, unknown_field, lambda _: b"\xc1"])
def test_nothing_is_held_against_what_cannot_be_read(client, broker, connection, change):
    client.submit("x", request_id="a")
    key = broker.keys.body("a")
    connection.set(key, change(connection.get(key)), keepttl=True)
    assert client.submit("y", request_id="a").request_id == "a"


def test_a_new_request_costs_no_look(client, broker, monkeypatch):
    def look(*_):
        raise QuireError("looked")

    for kind in ("broker.Broker", "async_broker.AsyncBroker"):
        monkeypatch.setattr(f"quire.{kind}.request_bytes", look)
    client.submit("x", request_id="a")
    client.submit_many([{"prompt": "x"}, GenerationRequest(kind="tokens", body={"prompt": [1]})])
    with pytest.raises(QuireError, match="looked"):
        client.submit("x", request_id="a")


def test_shards_are_looked_at_where_their_requests_are(connection, broker):
    client = Client(connection, queue=broker.keys.queue, shards=3)
    rows = [{"prompt": str(number), "request_id": f"r-{number}"} for number in range(9)]
    client.submit_many(rows)
    client.submit_many(rows)
    for number in range(9):
        with pytest.raises(RequestConflict, match=f"^request_id: r-{number} is"):
            client.submit("other", request_id=f"r-{number}")
