"""A durable broker keeps its promise or refuses to make it."""

import fakeredis
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, ResponseError

from quire import Client
from quire.errors import BrokerUnavailable, DurabilityUnavailable, UnknownRequest
from quire.keys import Keys
from quire.queue.broker import Broker
from quire.transport.connection import connect
from quire.transport.durability import Durability
from quire.wire.output import State
from tests.quire.builders import claim_next, make_item, make_request, read_all
from tests.quire.servers import let_old_server_be_found


@pytest.fixture(params=["found", "old"])
def start_server(request, start_server, monkeypatch):
    """WAITAOF came with Redis 7.2."""
    if request.param == "old":
        let_old_server_be_found(monkeypatch)
    return start_server


def has_waitaof(connection) -> bool:
    return "waitaof" in connection.command()


def run_one(broker):
    broker.ensure_groups()
    broker.submit(make_request(id="a"))
    broker.commit([make_item(claim_next(broker).claim, 0, 2, final=True)])


@pytest.mark.parametrize("append_only", [True, False])
def test_a_server_that_writes_later_is_refused_before_anything_is_sent(start_server, append_only):
    with start_server(append_only=append_only) as server, connect(server.url) as connection:
        if append_only and has_waitaof(connection):
            pytest.skip("this server has WAITAOF, so it can promise")
        broker = Broker(connection, durable=True)
        for _ in range(2):
            with pytest.raises(DurabilityUnavailable, match=r"WAITAOF|appendonly"):
                broker.submit(make_request(id="a"))
        with pytest.raises(UnknownRequest):
            broker.status("a")


def test_the_fake_promises_nothing():
    with fakeredis.FakeRedis() as fake, pytest.raises(DurabilityUnavailable):
        Broker(fake, durable=True).submit(make_request())


@pytest.mark.real_redis
def test_a_server_that_writes_every_command_through_is_good_enough(start_server):
    options = ["--appendfsync", "always"]
    with (
        start_server(append_only=True, options=options) as server,
        connect(server.url) as connection,
    ):
        run_one(Broker(connection, durable=True))
        server.restart()
        assert read_all(Broker(connection), "a")[1].state is State.COMPLETED


@pytest.mark.real_redis
def test_what_a_durable_broker_has_said_survives_the_death_of_the_server(start_server):
    with start_server(append_only=True) as server, connect(server.url) as connection:
        if not has_waitaof(connection):
            pytest.skip("WAITAOF came with Redis 7.2")
        run_one(Broker(connection, durable=True))
        handle = Client(connection, durable=True).submit("x", request_id="b")
        server.restart()
        assert read_all(Broker(connection), "a")[1].state is State.COMPLETED
        assert handle.status().state is State.QUEUED


class WithDisk(fakeredis.FakeRedis):
    """Has WAITAOF for those who ask whether there is one, as servers have since 7.2."""

    def execute_command(self, *arguments, **options):
        if arguments[0] == "WAITAOF":
            return [1, 0]
        return super().execute_command(*arguments, **options)


@pytest.fixture
def durability():
    with WithDisk() as connection:
        durability = Durability(connection, Keys("q"), longest_seconds=1.5)
        durability.require()
        yield durability


def test_every_wait_for_the_disk_has_a_write_of_its_own_before_it(durability):
    """WAITAOF waits for what its connection wrote, and a repeated call may write nothing."""
    with fakeredis.FakeRedis() as connection, connection.pipeline(transaction=False) as pipeline:
        durability.add_wait(pipeline)
        commands = [arguments for arguments, _ in pipeline.command_stack]
    assert commands == [
        ("SET", Keys("q").mark, "", "PX", 1000),
        ("WAITAOF", 1, 0, 1500),
    ]


def test_what_one_disk_has_is_confirmed_and_nothing_else_is(durability):
    durability.check([True, [1, 0]])
    with pytest.raises(BrokerUnavailable, match="did not reach the disk"):
        durability.check([True, [0, 0]])
    with pytest.raises(RedisConnectionError):
        durability.check([True, RedisConnectionError("gone")])


def test_a_wait_without_a_write_before_it_confirms_nothing(durability):
    with pytest.raises(NoPermissionError):
        durability.check([NoPermissionError("may not run the 'set' command"), [1, 0]])


def test_a_disk_that_was_switched_off_is_asked_about_again(durability):
    with pytest.raises(DurabilityUnavailable, match="appendonly"):
        durability.check([True, ResponseError("WAITAOF cannot be used when appendonly is off")])
    with fakeredis.FakeRedis() as connection, connection.pipeline(transaction=False) as pipeline:
        durability.add_wait(pipeline)
        assert pipeline.command_stack == []


WRITE_THROUGH = {"appendonly": "yes", "appendfsync": "always"}


@pytest.fixture
def write_through():
    """The durability of a server without WAITAOF that writes every command by itself."""
    with fakeredis.FakeRedis() as connection:
        durability = Durability(connection, Keys("q"), longest_seconds=1.5)
        durability._waits = False
        yield durability


def test_a_server_that_writes_through_is_asked_behind_every_write(write_through):
    with fakeredis.FakeRedis() as connection, connection.pipeline(transaction=False) as pipeline:
        write_through.add_wait(pipeline)
        commands = [arguments for arguments, _ in pipeline.command_stack]
    assert commands == [("CONFIG GET", "*append*")]
    write_through.check([WRITE_THROUGH])


@pytest.mark.parametrize(
    "found",
    [WRITE_THROUGH | {"appendfsync": "everysec"}, WRITE_THROUGH | {"appendonly": "no"}, {},
     WRITE_THROUGH | {"no-appendfsync-on-rewrite": "yes"},
     NoPermissionError("may not run the 'config|get' command")],
)  # fmt: skip
def test_a_server_that_writes_through_no_more_confirms_nothing(write_through, found):
    with pytest.raises(BrokerUnavailable, match="stopped writing"):
        write_through.check([found])
    with pytest.raises(DurabilityUnavailable):
        write_through.require()


def test_nothing_is_confirmed_where_another_thread_has_lost_the_promise(durability):
    with pytest.raises(BrokerUnavailable, match="stopped writing"):
        durability.check([])


@pytest.mark.real_redis
@pytest.mark.parametrize(
    ("setting", "value"),
    [("appendfsync", "no"), ("appendonly", "no"), ("no-appendfsync-on-rewrite", "yes")],
)
def test_a_promise_ends_when_the_server_stops_keeping_it(start_server, setting, value):
    options = ["--appendfsync", "always"]
    with (
        start_server(append_only=True, options=options) as server,
        connect(server.url) as connection,
    ):
        if has_waitaof(connection):
            pytest.skip("this server has WAITAOF, so its settings are not looked at")
        broker = Broker(connection, durable=True)
        broker.submit(make_request(id="a"))
        connection.config_set(setting, value)
        with pytest.raises(BrokerUnavailable, match="stopped writing"):
            broker.submit(make_request(id="b"))
        with pytest.raises(DurabilityUnavailable):
            broker.submit(make_request(id="c"))
        with pytest.raises(UnknownRequest):
            broker.status("c")


@pytest.mark.real_redis
def test_a_disk_that_does_not_answer_in_time_is_no_confirmation(monkeypatch, start_server):
    monkeypatch.setattr("quire.transport.durability.SYNC_SECONDS", 0.001)
    with start_server(append_only=True) as server, connect(server.url) as connection:
        if not has_waitaof(connection):
            pytest.skip("WAITAOF came with Redis 7.2")
        connection.config_set("appendfsync", "no")
        broker = Broker(connection, durable=True, retry_seconds=0.1)
        with pytest.raises(BrokerUnavailable, match="disk"):
            broker.submit_many([make_request() for _ in range(256)])
