"""Several answers to one prompt are as many requests, which every retry finds again."""

import pytest

from quire import Client, InvalidRequest, QueueFull, SamplingParams, State, UnknownRequest
from quire.queue.submit.routing import shard_of
from quire.wire.choices import MAX_CHOICES, id_of, seed_of
from quire.wire.codec import MAX_MESSAGE_BYTES
from quire.wire.protocol import MAX_REQUEST_ID_LENGTH, GenerationRequest
from tests.quire.builders import claim_next, make_item, make_request
from tests.quire.loop_face import blocking_client


@pytest.fixture
def client(broker):
    return Client(broker)


def claimed_requests(broker, number: int) -> list[GenerationRequest]:
    return [GenerationRequest.decode(claim_next(broker).request_bytes) for _ in range(number)]


def test_choices_differ_in_their_ids_and_seeds_alone(client, broker):
    sampling = SamplingParams(max_tokens=5, seed=7)
    handles = client.submit_choices([1, 2], n=3, sampling=sampling, request_id="r", priority="high")
    assert [handle.request_id for handle in handles] == ["r:0", "r:1", "r:2"]
    first, *others = claimed_requests(broker, 3)
    assert first.parse_body().sampling == sampling
    assert len({request.body["seed"] for request in (first, *others)}) == 3
    for other in others:
        assert other.body | {"seed": 7} == first.body
        assert dict(other) | {"id": first.id, "body": first.body} == dict(first)


def test_each_choice_is_read_and_ended_by_itself(client, broker):
    handles = client.submit_choices("x", n=3)
    ends = {}
    for length in (2, 3):
        claim = claim_next(broker).claim
        broker.commit([make_item(claim, 0, length, final=True)])
        ends[claim.request_id] = length
    assert [handle.cancel() for handle in handles[2:]] == [State.CANCELLED]
    for handle in handles[:2]:
        assert len(handle.result(timeout=5).token_ids) == ends[handle.request_id]


def test_a_retry_finds_the_same_choices_and_may_ask_for_more(client, broker):
    for n in (2, 2, 3):
        handles = client.submit_choices("x", n=n, request_id="r", sampling={"seed": 7})
        assert [handle.request_id for handle in handles] == [f"r:{index}" for index in range(n)]
    assert sum(broker.queue_depth().values()) == 3


def test_an_idempotency_key_leads_to_the_choices_of_the_earlier_call(client, broker):
    calls = [client.submit_choices("x", n=3, idempotency_key="k") for _ in range(2)]
    first, second = ([handle.request_id for handle in handles] for handles in calls)
    assert first == second and len(set(first)) == 3
    assert sum(broker.queue_depth().values()) == 3


def test_an_only_choice_is_the_request_as_it_always_was(client, broker):
    (handle,) = client.submit_choices("x", n=1, request_id="r", idempotency_key="k")
    assert handle.request_id == client.submit("x", idempotency_key="k").request_id == "r"


def test_a_queue_that_takes_some_choices_only_says_which(make_broker):
    client = Client(make_broker(max_backlog=2))
    with pytest.raises(QueueFull) as caught:
        client.submit_choices("x", n=3, request_id="r")
    assert caught.value.accepted == ("r:0", "r:1")


def test_the_seeds_of_choices_are_the_same_for_ever():
    assert [seed_of(7, index) for index in range(3)] == [
        *(7, -3_627_764_540_224_900_128, 4_504_606_891_059_362_275)
    ]
    assert seed_of(-(1 << 63), MAX_CHOICES - 1) != seed_of((1 << 63) - 1, MAX_CHOICES - 1)


@pytest.mark.parametrize("n", [0, -1, MAX_CHOICES + 1, True, 2.0, "2", None])
def test_a_number_of_choices_that_cannot_be_is_refused_before_anything_is_sent(client, broker, n):
    with pytest.raises(InvalidRequest) as caught:
        client.submit_choices("x", n=n)
    assert caught.value.field == "n"
    assert sum(broker.queue_depth().values()) == 0


@pytest.mark.parametrize(
    ("field", "longest"), [("request_id", MAX_REQUEST_ID_LENGTH), ("idempotency_key", 255)]
)
def test_an_id_or_a_key_that_has_no_room_for_the_number_is_refused_by_its_name(
    client, broker, field, longest
):
    fits = {field: "x" * (longest - 2)}
    with pytest.raises(InvalidRequest, match=f"at most {longest} characters, with the") as caught:
        client.submit_choices("x", n=11, **fits)
    assert caught.value.field == field
    assert sum(broker.queue_depth().values()) == 0
    assert len(client.submit_choices("x", n=10, **fits)) == 10


@pytest.mark.parametrize("open_client", [Client, blocking_client], ids=["threads", "event loop"])
def test_no_choice_is_sent_where_one_of_them_is_too_long(connection, broker, open_client):
    """The first one has a short seed, and would go to the first shard alone."""
    request_id = next(
        name
        for name in map(str, range(100))
        if shard_of(id_of(name, 0, n=2), 3) < shard_of(id_of(name, 1, n=2), 3)
    )

    def first(prompt):
        body = {"prompt": prompt, "seed": 7}
        return make_request(id=f"{request_id}:0", kind="completions", body=body)

    room = MAX_MESSAGE_BYTES - len(first("x" * 70_000).encode())
    prompt = "x" * (70_000 + room)
    assert len(first(prompt).encode()) == MAX_MESSAGE_BYTES
    with open_client(connection, queue=broker.keys.queue, shards=3) as client:
        call = {"request_id": request_id, "sampling": {"seed": 7}}
        with pytest.raises(InvalidRequest, match="the limit is") as caught:
            client.submit_choices(prompt, n=2, **call)
        assert caught.value.field == "body"
        for choice in (0, 1):
            with pytest.raises(UnknownRequest):
                client.status(id_of(request_id, choice, n=2))
        # By itself the first can be sent.
        client.submit(prompt, **call | {"request_id": f"{request_id}:0"})
