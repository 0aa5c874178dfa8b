"""Clients follow the ends of a queue, with a cursor of their own or as consumers of a group."""

import asyncio
import contextlib

import pytest

from quire import AsyncClient, Client, InvalidRequest
from quire.broker.broker import Broker
from tests.quire.builders import make_request


@pytest.fixture
def client(broker):
    return Client(broker)


def end(broker, *names):
    for name in names:
        broker.submit(make_request(id=name))
        broker.cancel(name)


def names(ends):
    return [end.request_id for end in ends]


def test_a_reader_goes_on_after_the_last_end_it_has_seen(client, broker):
    end(broker, "a", "b")
    first, second = client.ends(timeout=0.01)
    end(broker, "c")
    assert names(client.ends(after=first.position, timeout=0.01)) == ["b", "c"]
    assert names(client.ends(after=second.position, timeout=0.01)) == ["c"]


def test_a_reader_waits_for_the_next_end(client, broker):
    ends = client.ends(timeout=5)
    end(broker, "a")
    assert next(ends).request_id == "a"
    end(broker, "b")
    assert next(ends).request_id == "b"
    ends.close()


def test_a_reader_of_ends_that_the_server_has_lost_starts_again(client, broker, connection):
    end(broker, "a", "b")
    _, lost = client.ends(timeout=0.01)
    connection.xdel(broker.keys.ends, lost.position)
    assert names(client.ends(after=lost.position, timeout=0.01)) == ["a"]
    # As a server whose clock is behind: the next end is before the cursor.
    ((before, fields),) = connection.xrange(broker.keys.ends)
    connection.delete(broker.keys.ends)
    time_ms = int(before.split(b"-")[0]) - 1000
    connection.xadd(broker.keys.ends, fields, id=f"{time_ms}-0")
    assert names(client.ends(after=lost.position, timeout=0.01)) == ["a"]
    # So that the books know of both again.
    connection.delete(*broker.keys.of_request("b"))


def test_an_end_is_acknowledged_when_the_next_one_is_asked_for(client, broker):
    end(broker, "a", "b", "c")
    ends = client.ends(group="sinks", consumer="one", timeout=0.01)
    assert (next(ends).request_id, next(ends).request_id) == ("a", "b")
    ends.close()
    # `b` was being handled. The same consumer gets it again, with what was delivered with it.
    assert names(client.ends(group="sinks", consumer="one", timeout=0.01)) == ["b", "c"]
    assert names(client.ends(group="sinks", consumer="one", timeout=0.01)) == []


def test_a_consumer_takes_over_what_another_one_left(client, broker, monkeypatch):
    end(broker, "a")
    dead = client.ends(group="sinks", consumer="one", timeout=0.01)
    assert next(dead).request_id == "a"
    assert names(client.ends(group="sinks", consumer="two", timeout=0.01)) == []
    monkeypatch.setattr("quire.client.ends.TAKE_OVER_SECONDS", 0.0)
    assert names(client.ends(group="sinks", consumer="two", timeout=0.01)) == ["a"]
    dead.close()


def test_a_consumer_whose_sink_fails_gets_the_end_again(client, broker):
    end(broker, "a", "b")

    def pass_on():
        for one in client.ends(group="sinks", consumer="one", timeout=0.01):
            raise OSError(one.request_id)

    with pytest.raises(OSError, match="a"):
        pass_on()
    assert names(client.ends(group="sinks", consumer="one", timeout=0.01)) == ["a", "b"]


def test_a_cursor_covers_all_shards(connection, broker):
    shards = [Broker(connection, queue=broker.keys.queue, shard=shard) for shard in range(2)]
    client = Client(connection, queue=broker.keys.queue, shards=2)
    end(shards[0], "a", "b")
    end(shards[1], "c")
    *_, last = ends = list(client.ends(timeout=0.2))
    assert sorted(names(ends)) == ["a", "b", "c"]
    end(shards[1], "d")
    assert names(client.ends(after=last.position, timeout=0.2)) == ["d"]
    assert names(client.ends(after=ends[0].position, timeout=0.2)) == ["b", "c", "d"]
    got = [*client.ends(group="sinks", consumer="one", timeout=0.2)]
    assert sorted(names(got)) == ["a", "b", "c", "d"]
    with pytest.raises(InvalidRequest, match="after"):
        client.ends(after=last.position.split(",")[0])
    for key in connection.scan_iter(match=f"{shards[1].keys.prefix}:*"):
        connection.delete(key)


@pytest.mark.parametrize(
    "wrong",
    [
        {"after": "soon"},
        {"group": "sinks"},
        {"consumer": "one"},
        {"group": "sinks", "consumer": "one", "after": "1-0"},
        {"group": "si nks", "consumer": "one"},
        {"group": "sinks", "consumer": ""},
    ],
)
def test_a_reading_that_cannot_be_meant_is_refused(client, wrong):
    with pytest.raises(InvalidRequest):
        client.ends(**wrong)


def test_coroutines_read_the_same_ends(real_server, real_broker):
    end(real_broker, "a", "b")

    async def read():
        async with AsyncClient(real_server.url, queue=real_broker.keys.queue) as client:
            first, second = [one async for one in client.ends(timeout=0.01)]
            after = [one async for one in client.ends(after=first.position, timeout=0.01)]
            assert after == [second]
            sink = client.ends(group="sinks", consumer="one", timeout=0.01)
            async with contextlib.aclosing(sink):
                assert (await anext(sink)).request_id == "a"
            sink = client.ends(group="sinks", consumer="one", timeout=0.01)
            return [one.request_id async for one in sink]

    assert asyncio.run(read()) == ["a", "b"]
