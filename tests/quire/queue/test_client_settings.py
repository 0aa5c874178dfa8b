"""A client knows of its queue what the workers of it were told."""

import asyncio

import pytest

from quire import AsyncClient, Client
from quire.queue.broker_async import AsyncBroker
from tests.quire.loop_face import async_twin

DURATIONS = {"max_queue_seconds": 100.0, "retention_seconds": 20.0}


def test_a_request_lives_as_long_as_the_client_was_told(connection, broker):
    client = Client(connection, queue=broker.keys.queue, **DURATIONS)
    handle = client.submit("x")
    assert 100_000 < connection.pttl(broker.keys.request(handle.request_id)) <= 120_000
    handle.cancel()
    assert connection.pttl(broker.keys.output(handle.request_id)) <= 20_000


def test_a_client_of_a_loop_is_told_the_same(connection, broker):
    async def scenario():
        client = AsyncClient(async_twin(connection), queue=broker.keys.queue, **DURATIONS)
        handle = await client.submit("x")
        await client.close()
        return handle.request_id

    key = broker.keys.request(asyncio.run(scenario()))
    assert 100_000 < connection.pttl(key) <= 120_000


@pytest.mark.parametrize("seconds", [0, -1, 1e-9, 1e300, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["lease_seconds", "max_queue_seconds", "retention_seconds"])
def test_a_duration_that_redis_cannot_keep_is_refused(connection, name, seconds):
    for kind, link in ((Client, connection), (AsyncClient, async_twin(connection))):
        with pytest.raises(ValueError, match=r"must be 0\.001 to 315360000, and max_attempts at"):
            kind(link, **{name: seconds})


def test_a_broker_that_is_set_up_already_takes_no_settings(connection, broker):
    with pytest.raises(ValueError, match="a Broker is for one shard and has its own settings"):
        Client(broker, **DURATIONS)

    async def scenario():
        AsyncClient(AsyncBroker(async_twin(connection)), **DURATIONS)

    with pytest.raises(ValueError, match="a Broker is for one shard and has its own settings"):
        asyncio.run(scenario())
