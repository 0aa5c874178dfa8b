"""A read that waits for news keeps all of its patience for the server, however long it has waited.

Each of these has waited for longer than a call is repeated when its connection is lost.
"""

import asyncio

import pytest
import redis

from quire.client.client import Client
from quire.client.client_async import AsyncClient
from quire.client.reader import SharedReadsBroker
from quire.queue.broker import Broker
from quire.queue.broker_async import AsyncBroker
from quire.transport.connection_async import connect_async
from tests.quire.builders import claim_next, make_item, make_request, token_at
from tests.quire.waiting import Reading, eventually

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(60)]

RETRY_SECONDS = 0.5
#: Redis tells it in whole seconds, and begins a new one at any moment of the first.
WAITED_SECONDS = 2


def cut_a_read_that_has_waited(connection: redis.Redis) -> None:
    def is_cut() -> bool:
        for client in connection.client_list():
            if client["cmd"] == "xread" and int(client["idle"]) >= WAITED_SECONDS:
                return bool(connection.client_kill_filter(_id=client["id"]) == 1)
        return False

    eventually(is_cut)


def end(broker: Broker) -> None:
    broker.commit([make_item(claim_next(broker).claim, 0, 2, final=True)])


@pytest.mark.parametrize("make", [Broker, SharedReadsBroker])
def test_the_stream_of_a_client(real_broker, real_connection, make):
    quire = Client(make(real_connection, queue=real_broker.keys.queue, retry_seconds=RETRY_SECONDS))
    quire.submit_many([make_request(id="r")])
    reading = Reading(lambda: quire.attach("r").result().token_ids)
    cut_a_read_that_has_waited(real_connection)
    end(real_broker)
    assert reading.result() == (token_at(0), token_at(1))


async def whole(quire: AsyncClient) -> tuple[int, ...]:
    return (await quire.attach("g~r").result()).token_ids


async def whole_of_group(quire: AsyncClient) -> tuple[int, ...]:
    (completion,) = [completion async for completion in quire.attach_group("g").results()]
    return completion.token_ids


@pytest.mark.parametrize("read_with", [whole, whole_of_group])
def test_the_stream_of_a_client_in_a_loop(real_server, real_broker, real_connection, read_with):
    async def read() -> tuple[int, ...]:
        async with connect_async(real_server.url) as connection:
            queue = real_broker.keys.queue
            broker = AsyncBroker(connection, queue=queue, retry_seconds=RETRY_SECONDS)
            async with AsyncClient(broker) as quire:
                return await read_with(quire)

    real_broker.submit(make_request(id="g~r"))
    reading = Reading(lambda: asyncio.run(read()))
    cut_a_read_that_has_waited(real_connection)
    end(real_broker)
    assert reading.result() == (token_at(0), token_at(1))


def test_who_waits_for_the_ends_of_a_group(real_broker, real_connection):
    quire = Client(
        Broker(real_connection, queue=real_broker.keys.queue, retry_seconds=RETRY_SECONDS)
    )
    group = quire.submit_many([make_request(id="r")], group="g")
    reading = Reading(lambda: [completion.token_ids for completion in group.results()])
    cut_a_read_that_has_waited(real_connection)
    end(real_broker)
    assert reading.result() == [(token_at(0), token_at(1))]
