"""A reader is told of a loss only if there was one, and of a broken log only if it is its own."""

import asyncio

import pytest
import redis

from quire import BrokerUnavailable, Client
from quire.client.client_async import AsyncClient
from quire.client.following import Following
from quire.client.reader import SharedReadsBroker
from quire.queue.broker import Broker
from quire.queue.broker_async import AsyncBroker
from tests.quire.builders import claim_next, make_item, token_at
from tests.quire.loop_face import async_twin
from tests.quire.waiting import Reading, blocked, eventually


class LateBroker(Broker):
    """Whose waiting reads all return before they were made, as in a process that is very busy."""

    def read_output(self, seen, *, block_seconds=None):
        return {} if block_seconds is not None else super().read_output(seen)


def test_waiting_reads_that_come_too_late_are_no_loss(connection, broker):
    handle = Client(LateBroker(connection, queue=broker.keys.queue)).submit("x")
    claim = claim_next(broker).claim
    broker.commit([make_item(claim, 0, 2)])
    stream = handle.stream()
    assert next(stream).end == 2
    broker.commit([make_item(claim, 2, 4, final=True)])
    assert [chunk.end for chunk in stream] == [4]


def test_nor_are_they_in_an_event_loop(connection, broker, monkeypatch):
    read_output = AsyncBroker.read_output

    async def late(self, seen, *, block_seconds=None):
        return {} if block_seconds is not None else await read_output(self, seen)

    monkeypatch.setattr(AsyncBroker, "read_output", late)

    async def scenario():
        async with AsyncClient(async_twin(connection), queue=broker.keys.queue) as client:
            stream = (await client.submit("x")).stream()
            claim = claim_next(broker).claim
            broker.commit([make_item(claim, 0, 2)])
            assert (await anext(stream)).end == 2
            broker.commit([make_item(claim, 2, 4, final=True)])
            return [chunk.end async for chunk in stream]

    assert asyncio.run(scenario()) == [4]


def test_what_was_read_since_shows_that_the_log_is_there(broker):
    request_id = Client(broker).submit("x").request_id
    broker.commit([make_item(claim_next(broker).claim, 0, 2, final=True)])
    following, status = Following(request_id), broker.status(request_id)
    for _ in range(2):
        following.silent(status)
        assert following.must_find_the_end
        list(following.take(broker.read_output({request_id: following.seen})[request_id]))
        assert not following.must_find_the_end


@pytest.mark.parametrize("is_in_loop", [False, True])
def test_a_reader_is_not_told_of_a_loss_because_the_log_positions_are_gone(
    connection, broker, is_in_loop
):
    request_id = Client(broker).submit("x").request_id
    claim = claim_next(broker).claim
    broker.commit([make_item(claim, 0, 1)])
    broker.commit([make_item(claim, 1, 18)])
    following = Following(request_id)
    list(following.take(broker.read_output(following.position)[request_id]))
    before = broker.status(request_id)
    assert connection.hget(broker.keys.request(request_id), "published") == b"1"
    connection.delete(broker.keys.log_positions)

    async def status_in_loop():
        async with AsyncClient(async_twin(connection), queue=broker.keys.queue) as client:
            return await client.status(request_id)

    after = asyncio.run(status_in_loop()) if is_in_loop else broker.status(request_id)
    following.silent(after)
    assert (after.published, after.prefix_hash) == (18, before.prefix_hash)
    # The next tokens are judged by the log, and write a position again.
    (reply,) = broker.commit([make_item(claim, 18, 20)])
    assert (reply.status, connection.hlen(broker.keys.log_positions)) == ("ok", 1)


def test_a_log_that_is_none_does_not_keep_the_status_from_its_reader(connection, broker):
    request_id = Client(broker).submit("x").request_id
    broker.commit([make_item(claim_next(broker).claim, 0, 2)])
    connection.delete(broker.keys.log_positions)
    connection.set(broker.keys.output(request_id), "no stream", ex=60)
    assert broker.status(request_id).published == 2


@pytest.fixture
def two(real_broker):
    """Two requests that run; the log of the second is to become a text."""
    client = Client(real_broker)
    good, bad = client.submit("x").request_id, client.submit("y").request_id
    claims = {claim_next(real_broker).claim for _ in range(2)}
    return next(claim for claim in claims if claim.request_id == good), good, bad


def until_somebody_waits(connection: redis.Redis) -> None:
    eventually(lambda: bool(blocked(connection)))


@pytest.mark.real_redis
@pytest.mark.timeout(60)
def test_a_log_that_is_none_fails_its_own_reader_alone(real_connection, real_broker, two):
    claim, good, bad = two
    shared = SharedReadsBroker(real_connection, queue=real_broker.keys.queue)
    reading = Reading(lambda: Client(shared).attach(good).result().token_ids)
    until_somebody_waits(real_connection)
    real_connection.set(real_broker.keys.output(bad), "no stream", ex=60)
    with pytest.raises(BrokerUnavailable, match="WRONGTYPE"):
        shared.read_output({bad: 0}, block_seconds=30)
    real_broker.commit([make_item(claim, 0, 2, final=True)])
    assert reading.result() == (token_at(0), token_at(1))


@pytest.mark.real_redis
@pytest.mark.timeout(60)
def test_so_it_does_in_an_event_loop(real_connection, real_broker, two):
    claim, good, bad = two

    async def scenario():
        async with AsyncClient(async_twin(real_connection), queue=real_broker.keys.queue) as client:
            reading = asyncio.create_task(client.attach(good).result())
            await asyncio.to_thread(until_somebody_waits, real_connection)
            real_connection.set(real_broker.keys.output(bad), "no stream", ex=60)
            with pytest.raises(BrokerUnavailable, match="WRONGTYPE"):
                await client.brokers[0].read_output({bad: 0}, block_seconds=30)
            real_broker.commit([make_item(claim, 0, 2, final=True)])
            return (await reading).token_ids

    assert asyncio.run(scenario()) == (token_at(0), token_at(1))
