"""A durable client of an event loop keeps its promise or refuses to make it."""

import asyncio

import fakeredis
import pytest

from quire.client.client_async import AsyncClient
from quire.errors import BrokerUnavailable, DurabilityUnavailable, UnknownRequest
from quire.queue.broker import Broker
from quire.transport.connection import connect
from quire.wire.output import State


async def submit_durably(server):
    async with AsyncClient(server, durable=True) as client:
        return (await client.submit("x", request_id="a")).request_id


@pytest.mark.real_redis
def test_what_a_durable_submit_has_confirmed_survives_the_death_of_the_server(start_server):
    options = ["--appendfsync", "always"]
    with start_server(append_only=True, options=options) as server:
        asyncio.run(submit_durably(server.url))
        server.restart()
        with connect(server.url) as connection:
            assert Broker(connection).status("a").state is State.QUEUED


@pytest.mark.real_redis
def test_a_server_that_writes_nothing_is_refused_before_anything_is_sent(start_server):
    with start_server() as server, connect(server.url) as connection:
        for _ in range(2):
            with pytest.raises(DurabilityUnavailable, match=r"WAITAOF|appendonly"):
                asyncio.run(submit_durably(server.url))
        with pytest.raises(UnknownRequest):
            Broker(connection).status("a")


def test_the_fake_promises_nothing_to_a_loop_either():
    with pytest.raises(DurabilityUnavailable):
        asyncio.run(submit_durably(fakeredis.FakeAsyncRedis()))


@pytest.mark.real_redis
def test_a_loop_hears_that_the_server_does_not_write_through_any_more(start_server):
    options = ["--appendfsync", "always"]

    async def submit_twice(server, connection):
        async with AsyncClient(server.url, durable=True) as client:
            await client.submit("x")
            connection.config_set("appendfsync", "no")
            await client.submit("y")

    with (
        start_server(append_only=True, options=options) as server,
        connect(server.url) as connection,
    ):
        if "waitaof" in connection.command():
            pytest.skip("this server has WAITAOF, so its settings are not looked at")
        with pytest.raises(BrokerUnavailable, match="stopped writing"):
            asyncio.run(submit_twice(server, connection))
