"""A failover behind one url: its name leads to the new master, old connections to the old one."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import redis

from quire.client.client import Client
from quire.client.client_async import AsyncClient
from quire.client.reader import SharedReadsBroker
from quire.queue.broker import Broker
from quire.transport.connection import connect
from quire.transport.connection_async import connect_async
from quire.transport.local_redis import LocalRedis
from quire.wire.output import State
from tests.quire.builders import claim_next, make_item, make_request, port_of, token_at
from tests.quire.proxy import Wire, wire_to
from tests.quire.waiting import PATIENCE_SECONDS, Reading, eventually

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(90)]


@dataclass
class Pair:
    """A master and its replica, and the wire by which callers reach whichever is the master."""

    wire: Wire
    servers: list[LocalRedis]

    @property
    def master(self) -> redis.Redis:
        return connect(self.servers[0].url)

    def fail_over(self) -> None:
        """The replica has all there is, and becomes the master; the old master its replica."""
        old, new = self.servers
        follow(connect(new.url), "NO", "ONE")
        self.wire.lead_to(new.url)
        follow(connect(old.url), "127.0.0.1", port_of(new))
        self.servers.reverse()

    def wait_for_replica(self) -> None:
        with connect(self.servers[0].url, block_seconds=PATIENCE_SECONDS) as master:
            assert master.wait(1, int(PATIENCE_SECONDS * 1000)) == 1


@pytest.fixture
def pair(start_server: Callable[..., LocalRedis]) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        options = ("--repl-diskless-sync-delay", "0")
        servers = [stack.enter_context(start_server(options=options)) for _ in range(2)]
        wire = stack.enter_context(wire_to(servers[0].url))
        follow(connect(servers[1].url), "127.0.0.1", port_of(servers[0]))
        replica = connect(servers[1].url)
        eventually(lambda: replica.info("replication")["master_link_status"] == "up")
        yield Pair(wire, servers)


def follow(connection: redis.Redis, host: str, port: str) -> None:
    connection.execute_command("REPLICAOF", host, port)


def test_a_worker_goes_on_at_the_new_master(pair):
    with connect(pair.wire.url) as connection:
        broker = Broker(connection)
        broker.ensure_groups()
        broker.submit(make_request(id="r"))
        claim = claim_next(broker).claim
        broker.commit([make_item(claim, 0, 2)])
        pair.wait_for_replica()
        pair.fail_over()
        assert broker.commit([make_item(claim, 2, 4)])[0].published == 4
        pair.wait_for_replica()
        pair.fail_over()
        assert broker.heartbeat([claim])[0].alive
        pair.wait_for_replica()
        pair.fail_over()
        # A replica answers reads, so this one may come from the old master.
        assert broker.peek(count=1, block_seconds=0) == []
        broker.submit(make_request(id="s"))
        assert claim_next(broker).claim.request_id == "s"


def test_the_client_of_a_loop_goes_on_at_the_new_master(pair):
    async def submits() -> list[State]:
        async with AsyncClient(connect_async(pair.wire.url)) as quire:
            await quire.submit_many([make_request(id="a")])
            await asyncio.to_thread(pair.wait_for_replica)
            await asyncio.to_thread(pair.fail_over)
            await quire.submit_many([make_request(id="b")])
            return [(await quire.attach(name).status()).state for name in "ab"]

    assert asyncio.run(submits()) == [State.QUEUED, State.QUEUED]


@pytest.mark.parametrize("make", [Broker, SharedReadsBroker])
def test_a_reader_that_waits_is_told_nothing_of_it(pair, make):
    with connect(pair.wire.url) as connection:
        quire = Client(make(connection))
        claim = submit(quire, pair)
        begun = reading(lambda: read_all(quire), pair)
        go_on(claim, pair)
        assert begun.result() == [token_at(n) for n in range(3)]


def test_nor_is_a_reader_in_a_loop(pair):
    async def read() -> list[int]:
        async with AsyncClient(connect_async(pair.wire.url)) as quire:
            chunks = quire.attach("r").stream()
            return [token async for chunk in chunks for token in chunk.token_ids]

    with connect(pair.wire.url) as connection:
        claim = submit(Client(Broker(connection)), pair)
    begun = reading(lambda: asyncio.run(read()), pair)
    go_on(claim, pair)
    assert begun.result() == [token_at(n) for n in range(3)]


def test_a_replica_that_serves_nothing_old_is_left_as_well(pair):
    """Of such a replica that has no master nothing can be read either."""
    with connect(pair.wire.url) as connection:
        broker = Broker(connection)
        broker.submit(make_request(id="r"))
        pair.wait_for_replica()
        pair.master.config_set("replica-serve-stale-data", "no")
        pair.fail_over()
        follow(connect(pair.servers[1].url), "127.0.0.1", "1")
        assert broker.status("r").state is State.QUEUED


def submit(quire, pair):
    """A request that runs, and has published nothing yet."""
    quire.submit_many([make_request(id="r")])
    with connect(pair.servers[0].url) as connection:
        broker = Broker(connection)
        broker.ensure_groups()
        claim = claim_next(broker).claim
        pair.wait_for_replica()
    return claim


def reading(read, pair):
    """Begins to read; returns once the master has blocked the read."""
    begun = Reading(read)
    eventually(lambda: pair.master.info("clients")["blocked_clients"] > 0)
    return begun


def read_all(quire) -> list[int]:
    return [token for chunk in quire.attach("r").stream() for token in chunk.token_ids]


def go_on(claim, pair) -> None:
    """The worker, wherever it is, goes on at the new master."""
    pair.fail_over()
    with connect(pair.servers[0].url) as connection:
        broker = Broker(connection)
        broker.commit([make_item(claim, 0, 2)])
        broker.commit([make_item(claim, 2, 3, final=True)])
