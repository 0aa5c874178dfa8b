"""A Redis without memory refuses writes; whoever reads goes on."""

import asyncio

import pytest

from quire import AsyncClient, BrokerUnavailable, Client, connect
from quire.queue.broker import Broker
from quire.queue.view.inspection import inspect_memory, inspect_shards
from tests.quire.builders import claim_next, make_item, make_request

pytestmark = pytest.mark.real_redis


@pytest.fixture
def admin(start_server):
    """A server without memory, with two requests that ended, one that runs and one that waits."""
    with start_server() as server, connect(server.url) as connection:
        broker = Broker(connection)
        broker.ensure_groups()
        for name in ("g~a", "g~b", "runs", "waits"):
            broker.submit(make_request(id=name, session_id="s" if name == "waits" else None))
        for _ in range(2):
            broker.commit([make_item(claim_next(broker).claim, 0, 2, final=True)])
        broker.commit([make_item(claim_next(broker).claim, 0, 2)])
        broker.deliver("sinks", "gone")
        broker.cancel("waits")
        connection.config_set("maxmemory", 1)
        connection.server = server
        yield connection


#: What a client may read, and the answer.
READS = {
    "stream": lambda client: next(client.attach("runs").stream()).end,
    "result": lambda client: client.attach("g~a").result(timeout=30).usage.completion_tokens,
    "status": lambda client: str(client.status("runs").state),
    "group": lambda client: len(list(client.attach_group("g").results(timeout=30))),
    "counts": lambda client: sum(client.attach_group("g").wait(timeout=30).values()),
    "ends": lambda client: len(list(client.ends(timeout=0.01))),
    "models": lambda client: client.models(),
}
ANSWERS = {"stream": 2, "result": 2, "status": "running", "group": 2, "counts": 2, "ends": 3}


def test_every_reading_of_a_client_needs_no_memory(admin):
    with Client(admin.server.url) as client:
        assert {name: read(client) for name, read in READS.items()} == ANSWERS | {"models": []}
    assert len(inspect_shards(admin, [Broker(admin).keys])) == 1
    assert inspect_memory(admin).limit_bytes == 1


def take_over_at_once(monkeypatch):
    for module in ("ends", "ends_async"):
        monkeypatch.setattr(f"quire.client.{module}.TAKE_OVER_SECONDS", 0.0)


def test_consumers_of_a_group_read_acknowledge_and_take_over_without_memory(admin, monkeypatch):
    take_over_at_once(monkeypatch)
    with Client(admin.server.url) as client:
        ends = list(client.ends(group="sinks", consumer="one", timeout=0.01))
        assert [end.request_id for end in ends] == ["g~a", "g~b", "waits"]
        assert list(client.ends(group="sinks", consumer="one", timeout=0.01)) == []


def test_so_do_readers_in_an_event_loop(admin, monkeypatch):
    take_over_at_once(monkeypatch)

    async def read():
        async with AsyncClient(admin.server.url) as client:
            assert (await anext(client.attach("runs").stream())).end == 2
            assert (await client.attach("g~a").result(timeout=30)).usage.completion_tokens == 2
            assert len([one async for one in client.attach_group("g").results(timeout=30)]) == 2
            assert len([one async for one in client.ends(timeout=0.01)]) == 3
            ends = client.ends(group="sinks", consumer="one", timeout=0.01)
            with pytest.raises(BrokerUnavailable, match="no memory left for the group"):
                await anext(client.ends(group="new", consumer="one", timeout=0.01))
            return [end.request_id async for end in ends]

    assert asyncio.run(read()) == ["g~a", "g~b", "waits"]


def test_a_group_that_is_not_there_yet_is_an_outage_until_there_is_memory(admin):
    with Client(admin.server.url) as client:
        with pytest.raises(BrokerUnavailable, match="no memory left for the group"):
            next(client.ends(group="new", consumer="one"))
        admin.config_set("maxmemory", 0)
        assert len(list(client.ends(group="new", consumer="one", timeout=0.01))) == 3
