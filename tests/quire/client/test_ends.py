"""Clients follow the ends of a queue, with a cursor of their own or as consumers of a group."""

import asyncio
import contextlib

import pytest

from quire import AsyncClient, Client, InvalidRequest
from quire.client.shard_cursor import MAX_SEEN, NUM_LAST, ShardCursor
from quire.queue.broker import Broker
from quire.records import FinishReason, State, Usage
from quire.wire.ends import End
from quire.wire.protocol import Priority
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


def lose(connection, broker, position):
    """Redis loses one end, with its request, so that the books know of both again."""
    ((_, fields),) = connection.xrange(broker.keys.ends, number(position), number(position))
    connection.xdel(broker.keys.ends, number(position))
    connection.delete(*broker.keys.of_request(fields[b"id"].decode()))


def rewrite(connection, broker, kept, *later):
    """The ends as after a loss: so many of them, then others of a request `new` at positions."""
    key = broker.keys.ends
    entries = connection.xrange(key)
    connection.delete(key)
    for _, fields in entries:
        connection.delete(*broker.keys.of_request(fields[b"id"].decode()))
    for entry_id, fields in entries[:kept]:
        connection.xadd(key, fields, id=entry_id)
    for entry_id in later:
        connection.xadd(key, entries[-1][1] | {b"id": b"new"}, id=entry_id)


def make_end(time_ms):
    return End(
        f"{time_ms}-0",
        f"{time_ms}",
        "default",
        Priority.NORMAL,
        State.COMPLETED,
        FinishReason.EOS,
        Usage(),
        submitted_at=0.0,
        ended_at=time_ms / 1000,
    )


def number(position):
    """The position of an end without the earlier ones in the cursor."""
    return position.split(".")[0]


@pytest.mark.parametrize("at", [0, 1, 20, 39])
def test_a_reader_whose_last_end_is_lost_goes_on_without_repeating_others(
    client, broker, connection, at
):
    end(broker, *map(str, range(40)))
    ends = list(client.ends(timeout=0.01))
    lose(connection, broker, ends[at].position)
    later = [*map(str, range(at + 1, 40))]
    assert names(client.ends(after=ends[at].position, timeout=0.01)) == later
    end(broker, "new")
    assert names(client.ends(after=ends[at].position, timeout=0.01)) == [*later, "new"]


@pytest.mark.parametrize("num_lost", [1, 2, NUM_LAST - 1])
def test_a_reader_of_a_lost_tail_gets_the_next_ends_also_before_its_position(
    client, broker, connection, num_lost
):
    end(broker, *map(str, range(40)))
    reading = client.ends(timeout=5)
    *_, last = [next(reading) for _ in range(40)]
    newest = connection.xrange(broker.keys.ends)[39 - num_lost][0].decode()
    # The clock of the new server is behind: the next end is right after the last one that is kept.
    time_ms, _, index = newest.partition("-")
    after_loss = f"{time_ms}-{int(index) + 1}"
    rewrite(connection, broker, 40 - num_lost, after_loss)
    assert next(reading).request_id == "new"
    reading.close()
    assert names(client.ends(after=last.position, timeout=0.01)) == ["new"]


def test_after_a_long_loss_ends_of_at_most_as_long_a_time_come_again():
    ends = [make_end(time_ms) for time_ms in range(1, 2001)]
    cursor = ShardCursor()
    for one in ends:
        cursor.add(one)
    assert len(str(cursor)) < 300
    kept, again, cursor = ends[:1800], None, ShardCursor(str(cursor))
    while again is None:
        # The position is in the millisecond before the next end.
        again = cursor.unseen(kept[int(cursor.before_newest.split("-")[0]) :])
    assert 0 < len(again) <= 200
    assert again[-1] == kept[-1]


def test_another_end_at_the_position_of_a_lost_one_is_new(client, broker, connection):
    end(broker, "a", "b")
    _, lost = client.ends(timeout=0.01)
    rewrite(connection, broker, 1, number(lost.position))
    assert names(client.ends(after=lost.position, timeout=0.01)) == ["new"]


def test_a_reader_of_ends_that_are_all_lost_starts_again(client, broker, connection):
    end(broker, "a", "b")
    _, lost = client.ends(timeout=0.01)
    rewrite(connection, broker, 0, "1-0")
    assert names(client.ends(after=lost.position, timeout=0.01)) == ["new"]


def test_a_cursor_of_an_earlier_version_is_read(client, broker):
    end(broker, "a", "b", "c")
    _, second, _ = client.ends(timeout=0.01)
    assert names(client.ends(after=number(second.position), timeout=0.01)) == ["c"]


def test_an_end_is_acknowledged_when_the_next_one_is_asked_for(client, broker):
    end(broker, "a", "b", "c")
    ends = client.ends(group="sinks", consumer="one", timeout=0.01)
    assert (next(ends).request_id, next(ends).request_id) == ("a", "b")
    ends.close()
    # `b` was being handled. The same consumer gets it again, with what was delivered with it.
    assert names(client.ends(group="sinks", consumer="one", timeout=0.01)) == ["b", "c"]
    assert names(client.ends(group="sinks", consumer="one", timeout=0.01)) == []


def test_consumers_go_on_after_an_end_that_was_handled_and_is_lost(client, broker, connection):
    end(broker, "a", "b")
    *_, last = client.ends(group="sinks", consumer="one", timeout=0.01)
    lose(connection, broker, last.position)
    assert names(client.ends(group="sinks", consumer="one", timeout=0.01)) == []
    end(broker, "c")
    assert names(client.ends(group="sinks", consumer="two", timeout=0.01)) == ["c"]


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
        {"after": f"{2**64}-0"},
        {"after": "5-0:6-0"},
        {"after": "5-0.abc"},
        {"after": "5-0" + MAX_SEEN * ":0-0"},
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


def test_coroutines_read_the_same_ends(real_server, real_broker, real_connection):
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
            got = [one.request_id async for one in sink]
            lose(real_connection, real_broker, second.position)
            assert [one async for one in client.ends(after=second.position, timeout=0.01)] == []
            return got

    assert asyncio.run(read()) == ["a", "b"]
