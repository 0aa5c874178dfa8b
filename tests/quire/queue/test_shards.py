"""Several shards: every request has its place, told by its id, and callers do not notice."""

import asyncio
from collections import Counter
from datetime import UTC, datetime

import pytest

from quire import AsyncClient, Client, InvalidRequest, QueueFull, QueueLimits
from quire.keys import Keys
from quire.queue.broker import Broker
from quire.queue.claim.claim import Claimed
from quire.queue.submit.routing import shard_of
from quire.wire.output import State
from tests.quire.books import unbalanced
from tests.quire.builders import leaked_keys, make_item, make_request, read_and_claim, remove_queue
from tests.quire.loop_face import async_twin

NUM_SHARDS = 3


@pytest.fixture
def shards(connection, broker):
    """The brokers of a queue with several shards; the first is that of the other fixtures."""
    made = [Broker(connection, queue=broker.keys.queue, shard=n) for n in range(NUM_SHARDS)]
    for shard in made:
        shard.ensure_groups()
    yield made
    for shard in made[1:]:
        leaked, wrong = leaked_keys(connection, shard), unbalanced(connection, shard)
        remove_queue(connection, shard)
        assert (leaked, wrong) == ([], [])


@pytest.fixture
def client(connection, broker, shards):
    return Client(connection, queue=broker.keys.queue, shards=NUM_SHARDS)


def finish_all(shards):
    for broker in shards:
        while sum(broker.queue_depth().values()):
            answer = read_and_claim(broker)
            if isinstance(answer, Claimed):
                broker.commit([make_item(answer.claim, 0, 2, final=True)])


def test_the_shard_of_an_id_is_the_same_in_every_language():
    assert [shard_of(name, 8) for name in ("a", "order-7:row-3", "eval~1")] == [3, 1, 5]
    spread = Counter(shard_of(f"request-{n}", 4) for n in range(4000))
    assert min(spread.values()) > 900


def test_requests_are_spread_over_the_shards_and_answered_in_their_order(client, shards):
    requests = [make_request(id=f"r{n}") for n in range(30)]
    handles = client.submit_many(requests)
    assert [handle.request_id for handle in handles] == [request.id for request in requests]
    assert all(sum(broker.queue_depth().values()) > 0 for broker in shards)
    finish_all(shards)
    assert {handle.result(timeout=30).state for handle in handles} == {State.COMPLETED}
    assert client.result("r7").request_id == "r7"
    assert client.cancel("r7") is State.COMPLETED
    assert [chunk.end for chunk in client.stream("r8")] == [2]


def test_a_group_is_one_over_all_shards(client, shards):
    rows = [{"prompt": "x", "request_id": f"r{n}"} for n in range(12)]
    group = client.submit_many(rows, group="g")
    assert group.counts() == {State.QUEUED: 12}
    client.cancel("g~r3")
    finish_all(shards)
    assert len({completion.request_id for completion in group.results(timeout=30)}) == 12
    assert group.wait(timeout=30) == {State.COMPLETED: 11, State.CANCELLED: 1}


def test_an_idempotency_key_leads_to_the_same_shard(client, connection, broker):
    handles = [client.submit("x", idempotency_key="k") for _ in range(3)]
    assert len({handle.request_id for handle in handles}) == 1
    other = client.submit("x", idempotency_key="k", tenant="other")
    assert other.request_id != handles[0].request_id
    assert client.status(other.request_id).state is State.QUEUED
    with pytest.raises(InvalidRequest, match="many shards"):
        client.submit("x", idempotency_key="k", request_id="mine")


def test_an_idempotency_key_leads_to_the_same_choices(client):
    calls = [client.submit_choices("x", n=5, idempotency_key="k") for _ in range(2)]
    first, second = ([handle.request_id for handle in handles] for handles in calls)
    assert first == second and len(set(first)) == 5
    assert len({shard_of(request_id, NUM_SHARDS) for request_id in first}) > 1
    assert [handle.cancel() for handle in calls[1]] == [State.CANCELLED] * 5


def test_a_full_shard_refuses_its_part_only(client, shards):
    shards[1].set_limits(QueueLimits(requests=1))
    requests = [make_request(id=f"r{n}") for n in range(20)]
    with pytest.raises(QueueFull) as caught:
        client.submit_many(requests)
    places = Counter(shard_of(request_id, NUM_SHARDS) for request_id in caught.value.accepted)
    wanted = Counter(shard_of(request.id, NUM_SHARDS) for request in requests)
    assert wanted[1] > 1
    assert places == {0: wanted[0], 1: 1, 2: wanted[2]}


#: What passes for a request until it is encoded, or placed.
UNSENDABLE = [
    {"prompt": "x" * (1 << 20)},
    {"messages": [{"role": "user", "content": "x", "at": datetime(2030, 1, 1, tzinfo=UTC)}]},
    {"messages": [{"role": "user", "content": "x", "seen": {1: 2}}]},
    {"prompt": "x", "idempotency_key": "k", "request_id": "mine"},
]


@pytest.mark.parametrize("bad", UNSENDABLE)
def test_one_that_cannot_be_sent_is_told_by_its_place_and_no_shard_has_any(client, shards, bad):
    rows = [{"prompt": str(n), "request_id": f"r{n}"} for n in range(30)]
    with pytest.raises(InvalidRequest) as caught:
        client.submit_many([*rows, bad])
    assert caught.value.index == 30
    assert [sum(shard.queue_depth().values()) for shard in shards] == [0] * NUM_SHARDS


@pytest.mark.parametrize("bad", UNSENDABLE)
def test_nor_has_any_from_an_event_loop(connection, broker, shards, bad):
    async def scenario():
        twin = async_twin(connection)
        client = AsyncClient(twin, queue=broker.keys.queue, shards=NUM_SHARDS)
        rows = [{"prompt": str(n), "request_id": f"r{n}"} for n in range(30)]
        with pytest.raises(InvalidRequest) as caught:
            await client.submit_many([*rows, bad])
        await client.close()
        await twin.aclose()
        return caught.value.index

    assert asyncio.run(scenario()) == 30
    assert [sum(shard.queue_depth().values()) for shard in shards] == [0] * NUM_SHARDS


def test_the_name_of_a_group_counts_for_the_cap(client, shards):
    room = (1 << 20) - len(
        make_request(id="r", body={"prompt": [1], "user": "x" * 70_000}).encode()
    )
    fits = make_request(id="r", body={"prompt": [1], "user": "x" * (70_000 + room)})
    with pytest.raises(InvalidRequest, match="the limit is") as caught:
        client.submit_many([make_request(), fits], group="g")
    assert caught.value.index == 1
    assert [sum(shard.queue_depth().values()) for shard in shards] == [0] * NUM_SHARDS


def test_a_queue_has_at_least_one_shard_and_a_broker_serves_one(connection, broker):
    for wrong in (lambda: Client(connection, shards=0), lambda: Client(broker, shards=2)):
        with pytest.raises(ValueError, match="shard"):
            wrong()


def test_the_shards_of_a_queue_share_no_key():
    names = [set(Keys("q", n).of_workers) | set(Keys("q", n).of_scripts("g~a")) for n in range(2)]
    assert names[0].isdisjoint(names[1])
