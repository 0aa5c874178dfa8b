"""A Redis without memory is a full queue to its callers, and no reason to stop reading."""

import asyncio

import pytest

from quire import AsyncClient, Broker, Client, QueueFull, State, connect
from tests.quire.builders import claim_next, make_item, text_of


@pytest.fixture
def server(start_server):
    with start_server() as started:
        yield started


@pytest.fixture
def admin(server):
    with connect(server.url) as connection:
        yield connection


@pytest.mark.real_redis
def test_a_submit_without_memory_is_a_full_queue_until_there_is_some_again(server, admin):
    with Client(server.url) as client:
        admin.config_set("maxmemory", 1)
        with pytest.raises(QueueFull) as caught:
            client.submit("x", request_id="a")
        assert (caught.value.limit, caught.value.accepted) == ("memory", ())
        admin.config_set("maxmemory", 0)
        assert client.submit("x", request_id="a").status().state is State.QUEUED


@pytest.mark.real_redis
def test_a_submit_of_a_loop_is_told_the_same(server, admin):
    async def submit():
        async with AsyncClient(server.url) as client:
            await client.submit("x")

    admin.config_set("maxmemory", 1)
    with pytest.raises(QueueFull) as caught:
        asyncio.run(submit())
    assert caught.value.limit == "memory"


@pytest.mark.real_redis
def test_what_is_published_can_be_read_without_memory(server, admin):
    broker = Broker(admin)
    broker.ensure_groups()
    with Client(server.url) as client:
        handle = client.submit("x")
        broker.commit([make_item(claim_next(broker).claim, 0, 2, final=True)])
        admin.config_set("maxmemory", 1)
        assert handle.result(timeout=30).text == text_of(0) + text_of(1)
