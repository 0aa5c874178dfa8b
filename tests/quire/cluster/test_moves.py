"""Slots that move and masters that fail while requests are in them: nothing is lost."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from quire import AsyncClient, Client, connect
from quire.errors import BrokerUnavailable
from quire.keys import Keys
from quire.queue.broker import Broker
from quire.queue.claim.claim import Claimed
from quire.queue.publish.commit import CommitItem
from quire.transport.cluster import connection as cluster_connection
from quire.transport.cluster.redirects import Doubt
from tests.quire.clusters import Cluster, Node, another, until
from tests.quire.servers import real_program
from tests.quire.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.real_redis


@pytest.fixture
def queue() -> str:
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def connection(cluster: Cluster) -> Iterator[redis.Redis]:
    with connect(cluster.url) as made:
        yield made


def claimed(broker: Broker, client: Client) -> Claimed:
    client.submit("hello", sampling={"max_tokens": 8})
    broker.ensure_groups()
    (claim,) = broker.claim(broker.peek(count=1))
    assert isinstance(claim, Claimed)
    return claim


def test_after_a_move_every_kind_of_call_goes_to_the_new_node(
    cluster: Cluster, connection: redis.Redis, queue: str
):
    broker, keys = Broker(connection, queue=queue), Keys(queue)
    with Client(connection, queue=queue) as client:
        claim = claimed(broker, client).claim

        def move() -> None:
            cluster.move(keys, another(cluster, cluster.owner(keys)))

        move()  # A script alone, and a pipeline that is sent as it is made.
        assert [one.published for one in broker.commit([CommitItem(claim, 0, (1,), "a")])] == [1]
        move()
        assert [one.published for one in broker.commit([CommitItem(claim, 1, (2,), "b")])] == [2]
        move()  # A single command.
        assert broker.status(claim.request_id).published == 2
        move()  # A pipeline, also one that is never repeated.
        assert broker.peek(count=1) == []
        move()  # A transaction.
        broker.pause("moved")
        move()  # Scripts in a pipeline.
        client.submit_many([{"prompt": "hello"}] * 3)
        assert broker.heartbeat([claim])[0].alive


def test_a_read_that_waits_continues_at_the_new_node(
    cluster: Cluster, connection: redis.Redis, queue: str
):
    broker, keys = Broker(connection, queue=queue), Keys(queue)
    with Client(connection, queue=queue) as client:
        claim = claimed(broker, client).claim
        broker.commit([CommitItem(claim, 0, (1,), "a")])
        found: list[str] = []
        stream = client.stream(claim.request_id)

        def follow() -> None:
            for _, chunk in zip(range(2), stream, strict=False):
                found[:] = [*found, chunk.text]

        reader, node = threading.Thread(target=follow), cluster.owner(keys)
        reader.start()
        until(lambda: found == ["a"] and node.has_blocked(), "it waits for more")
        cluster.move(keys, another(cluster, node))
        broker.commit([CommitItem(claim, 1, (2,), "b")])
        reader.join(PATIENCE_SECONDS)
        assert found == ["a", "b"]


def num_refused(node: Node) -> int:
    """How often the node has said TRYAGAIN."""
    found = node.client.info("errorstats").get("errorstat_TRYAGAIN", {"count": 0})
    return int(found["count"])


@contextmanager
def half_moved(cluster: Cluster, keys: Keys, *names: str) -> Iterator[tuple[Node, Node]]:
    """The slot is being moved: only these keys are at the new node. Afterwards all are."""
    target = another(cluster, cluster.owner(keys))
    source = cluster.begin_move(keys, target)
    for name in names:
        source.call("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
    yield source, target
    cluster.move_keys(keys, source, target)
    cluster.end_move(keys, target)


def test_in_the_middle_of_a_move_reads_follow_each_key(
    cluster: Cluster, connection: redis.Redis, queue: str
):
    broker, keys = Broker(connection, queue=queue), Keys(queue)
    with Client(connection, queue=queue) as client:
        handles = client.submit_many([{"prompt": "hello"}] * 3)
        gone = handles[0].request_id
        with half_moved(cluster, keys, keys.request(gone), keys.rank(1)) as (_, target):
            moved = {keys.request(gone), keys.rank(1)}
            assert target.keys_of(keys) == moved
            assert {handle.status().state for handle in handles} == {"queued"}
            assert len(broker.peek(count=10)) == 3


def test_an_event_loop_follows_each_key_too(cluster: Cluster, queue: str):
    keys = Keys(queue)

    async def play() -> None:
        async with AsyncClient(cluster.url, queue=queue) as client:
            handles = [await client.submit("hello") for _ in range(3)]
            with half_moved(cluster, keys, keys.request(handles[0].request_id)):
                statuses = [await handle.status() for handle in handles]
            assert {status.state for status in statuses} == {"queued"}

    asyncio.run(play())


def test_a_script_waits_until_all_its_keys_are_on_one_side(
    cluster: Cluster, connection: redis.Redis, queue: str
):
    broker, keys = Broker(connection, queue=queue, retry_seconds=PATIENCE_SECONDS), Keys(queue)
    with Client(broker) as client:
        claim = claimed(broker, client).claim
        replies: list[object] = []
        with half_moved(cluster, keys, keys.request(claim.request_id)) as (source, target):
            commit = CommitItem(claim, 0, (1, 2), "ab")
            late = threading.Thread(target=lambda: replies.extend(broker.commit([commit])))
            # Redis 6.2 sends a script with missing keys to the new node, which says it then.
            before = num_refused(source) + num_refused(target)
            late.start()
            until(
                lambda: num_refused(source) + num_refused(target) > before,
                "a node has said TRYAGAIN",
            )
            assert not replies
            # Nothing was written on either side.
            log = keys.output(claim.request_id)
            assert log not in source.keys_of(keys) | target.keys_of(keys)
        late.join(PATIENCE_SECONDS)
        assert [reply.published for reply in replies] == [2]
        assert client.status(claim.request_id).published == 2


def test_without_following_such_a_read_would_find_nothing(
    cluster: Cluster, connection: redis.Redis, queue: str, monkeypatch: pytest.MonkeyPatch
):
    keys = Keys(queue)

    def give_up(self: object, error: redis.RedisError, *_: object) -> None:
        raise error

    with Client(connection, queue=queue, retry_seconds=0.0) as client:
        handle = client.submit("hello")
        with half_moved(cluster, keys, keys.request(handle.request_id)):
            monkeypatch.setattr(cluster_connection.SlotConnection, "followed", give_up)
            with pytest.raises(BrokerUnavailable, match=str(keys_slot(keys))):
                handle.status()
            monkeypatch.undo()


def keys_slot(keys: Keys) -> int:
    return cluster_connection.slot_of(keys.prefix)


@pytest.fixture
def pair() -> Iterator[Cluster]:
    """A master with one replica."""
    # Nodes tell each other the news in less than this time.
    options = ("--cluster-node-timeout", "1000")
    with Cluster(real_program(), masters=1, replicas=1, options=options) as made:
        yield made


def fail_over(pair: Cluster) -> None:
    """Kills the master; its replica takes over, without the vote of a majority."""
    master, replica = pair.nodes
    until(lambda: offset_of(master) == offset_of(replica), "the replica has everything")
    master.kill()
    replica.call("CLUSTER", "FAILOVER", "TAKEOVER")


def offset_of(node: Node) -> int:
    found = node.client.info("replication")
    return int(found["slave_repl_offset" if "slave_repl_offset" in found else "master_repl_offset"])


def test_clients_find_the_replica_that_took_over(pair: Cluster):
    async def status(request_id: str) -> str:
        async with AsyncClient(pair.url, retry_seconds=PATIENCE_SECONDS) as client:
            await client.status(request_id)
            await asyncio.to_thread(fail_over, pair)
            return str((await client.status(request_id)).state)

    with Client(pair.url, retry_seconds=PATIENCE_SECONDS) as client:
        handle = client.submit("hello")
        assert asyncio.run(status(handle.request_id)) == "queued"
        assert client.submit("again").status().state == "queued"
        assert handle.status().state == "queued"


def test_without_asking_again_they_do_not_find_it(pair: Cluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Doubt, "is_due", False)
    with Client(pair.url, retry_seconds=1.0) as client:
        handle = client.submit("hello")
        fail_over(pair)
        with pytest.raises(BrokerUnavailable, match="cannot be reached"):
            handle.status()
