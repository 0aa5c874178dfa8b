"""A submit that is said again joins its request; another one under the same id is refused."""

import pickle

import pytest

from quire import Client, InvalidRequest, RequestConflict, SamplingParams, State
from tests.quire.builders import claim_next, make_item, make_request

PROPERTIES = {"a": {"enum": [1, 2]}, "b": {"type": "string"}}
SCHEMA = {"type": "object", "properties": PROPERTIES}
TURNED = {"type": "object", "properties": dict(reversed(PROPERTIES.items()))}

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
    "defaults": ({"prompt": "x"}, {"prompt": "x", "temperature": 1.0, "top_k": -1, "n": 1}),
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
    "order of a schema": (
        {"prompt": "x", "sampling": {"json_schema": SCHEMA}},
        {"prompt": "x", "sampling": {"json_schema": TURNED}},
    ),
    "model": ({"prompt": "x", "model": "m"}, {"prompt": "x", "model": "n"}),
    "adapter": ({"prompt": "x"}, {"prompt": "x", "adapter": "sql"}),
    "tenant": ({"prompt": "x"}, {"prompt": "x", "tenant": "gold"}),
}


@pytest.fixture
def client(broker):
    return Client(broker)


def finish(broker):
    finish_from(broker, 0)


def finish_from(broker, start):
    broker.commit([make_item(claim_next(broker).claim, start, start + 2, final=True)])


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
        with pytest.raises(RequestConflict, match=r"^request_id: a exists already") as caught:
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
    with pytest.raises(RequestConflict, match=r"^request 1: request_id: b exists") as caught:
        client.submit_many(rows)
    assert (caught.value.request_id, caught.value.index) == ("b", 1)
    assert [client.attach(name).status().state for name in "abc"] == [State.QUEUED] * 3
    with pytest.raises(RequestConflict, match="request 1: request_id: g~one"):
        client.submit_many([{"prompt": text, "request_id": "one"} for text in "xy"], group="g")


def test_choices_are_joined_again_and_other_ones_refused(client):
    first = client.submit_choices("x", n=3, request_id="a")
    again = client.submit_choices("x", n=3, request_id="a")
    assert [one.request_id for one in again] == [one.request_id for one in first]
    with pytest.raises(RequestConflict, match="a:0 exists"):
        client.submit_choices("y", n=3, request_id="a")


def test_of_many_that_are_said_again_the_last_is_compared_as_well(client):
    rows = [{"prompt": "x", "request_id": f"r-{number}"} for number in range(66)]
    client.submit_many(rows)
    client.submit_many(rows)
    with pytest.raises(RequestConflict, match=r"^request 65: "):
        client.submit_many([*rows[:-1], rows[-1] | {"prompt": "y"}])


def cancel(broker):
    broker.cancel("a")


def give_up(broker):
    broker.dead_letter(claim_next(broker).claim, "tired")


def give_up_and_requeue(broker, *, keep_tokens=True):
    claim = claim_next(broker).claim
    broker.commit([make_item(claim, 0, 2)])
    broker.dead_letter(claim, "tired")
    broker.requeue(broker.dead_letters()[0], keep_tokens=keep_tokens)


def requeue_once_it_is_gone(broker):
    give_up(broker)
    broker.connection.delete(*broker.keys.of_request("a"))
    broker.requeue(broker.dead_letters()[0], keep_tokens=True)


def begin_anew(broker):
    give_up_and_requeue(broker, keep_tokens=False)


def run_somewhere_else(broker):
    claim = claim_next(broker).claim
    broker.commit([make_item(claim, 0, 2)])
    broker.release([claim])
    finish_from(broker, 2)


@pytest.mark.parametrize(
    "befalls",
    [
        *(finish, cancel, give_up, give_up_and_requeue, begin_anew),
        *(requeue_once_it_is_gone, run_somewhere_else),
    ],
)
def test_whatever_becomes_of_a_request_it_is_known_what_it_asked(client, broker, befalls):
    client.submit("x", request_id="a")
    befalls(broker)
    state = broker.status("a").state
    assert client.submit("x", request_id="a").status().state is state
    with pytest.raises(RequestConflict, match="a exists already"):
        client.submit("y", request_id="a")
    with pytest.raises(RequestConflict, match="a exists already"):
        client.submit("x", request_id="a", sampling={"seed": 8})


def test_an_id_is_free_for_any_request_once_its_own_is_forgotten(client, broker, connection):
    client.submit("x", request_id="a")
    connection.delete(*broker.keys.of_request("a"))
    client.submit("y", request_id="a")
    with pytest.raises(RequestConflict):
        client.submit("x", request_id="a")


def test_an_idempotency_key_means_the_request_that_had_it_first(client):
    first = client.submit("x", idempotency_key="k")
    assert client.submit("y", idempotency_key="k").request_id == first.request_id


def test_so_it_does_where_the_id_is_made_of_the_key(connection, broker):
    client = Client(connection, queue=broker.keys.queue, shards=3)
    first = client.submit("x", idempotency_key="k")
    assert client.submit("y", idempotency_key="k").request_id == first.request_id


def test_a_key_does_not_hide_that_an_id_is_that_of_another_request(client, broker):
    client.submit("x", request_id="a", idempotency_key="k")
    for prompt, key in (("y", "fresh"), ("y", "k")):
        with pytest.raises(RequestConflict, match="a exists already"):
            client.submit(prompt, request_id="a", idempotency_key=key)
    for key in ("fresh", "k"):
        assert client.submit("x", request_id="a", idempotency_key=key).request_id == "a"
    assert client.submit("y", request_id="b", idempotency_key="k").request_id == "a"
    assert sum(broker.queue_depth().values()) == 1


@pytest.mark.parametrize("asked", [None, b"", b"0 by another rule", b"\xff"])
def test_nothing_is_held_against_one_that_does_not_say_what_it_asks(
    client, broker, connection, asked
):
    """As those of earlier clients, or of those in other languages."""
    client.submit("x", request_id="a")
    record = broker.keys.request("a")
    if asked is None:
        connection.hdel(record, "asked")
    else:
        connection.hset(record, "asked", asked)
    assert client.submit("y", request_id="a").request_id == "a"


def test_what_a_broker_was_given_is_known_as_well(client, broker):
    broker.submit(make_request(id="a"))
    client.submit_many([make_request(id="a", metadata={"row": 1})])
    with pytest.raises(RequestConflict):
        client.submit([7], request_id="a")
    # Its body is not checked there; nothing is known of what it asks.
    broker.submit(make_request(id="b", body={"nonsense": 1}))
    assert client.submit("x", request_id="b").request_id == "b"


def test_of_a_queue_of_shards_each_tells_of_its_requests(connection, broker):
    client = Client(connection, queue=broker.keys.queue, shards=3)
    rows = [{"prompt": str(number), "request_id": f"r-{number}"} for number in range(9)]
    client.submit_many(rows)
    client.submit_many(rows)
    for number in range(9):
        with pytest.raises(RequestConflict, match=f"^request_id: r-{number} exists"):
            client.submit("other", request_id=f"r-{number}")
