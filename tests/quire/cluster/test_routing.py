"""Clients and brokers on a cluster of three real masters: who is asked, and over what."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator

import pytest
import redis

from quire import AsyncClient, Client, connect
from quire.errors import BrokerUnavailable, Cancelled
from quire.keys import Keys
from quire.queue.broker import Broker
from quire.queue.view.inspection import inspect_memory
from quire.queue.view.view import Part, view_queues
from quire.transport.local_redis import LocalRedis
from quire.transport.slots import for_key
from tests.quire.clusters import Cluster, Node, another, spread, until

pytestmark = pytest.mark.real_redis

NUM_SHARDS = 6


@pytest.fixture
def queue() -> str:
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def connection(cluster: Cluster) -> Iterator[redis.Redis]:
    with connect(cluster.url) as made:
        yield made


def brokers_of(connection: redis.Redis, queue: str, shards: int = NUM_SHARDS) -> list[Broker]:
    return [Broker(connection, queue=queue, shard=shard) for shard in range(shards)]


def keys_on(node: Node, queue: str) -> set[int]:
    """The shards of the queue of which the node has keys."""
    names = node.client.scan_iter(match=f"quire:{{{queue}.*", count=1000)
    return {int(name.decode().partition("}")[0].rpartition(".")[2]) for name in names}


def test_each_shard_lives_on_the_node_that_owns_its_slot(cluster: Cluster, queue: str):
    placed = spread(cluster, queue, NUM_SHARDS)
    with Client(cluster.url, queue=queue, shards=NUM_SHARDS) as client:
        handles = [client.submit("hello") for _ in range(60)]
        assert {handle.status().state for handle in handles} == {"queued"}
    for node in set(placed.values()):
        assert keys_on(node, queue) == {shard for shard, one in placed.items() if one is node}


def test_an_event_loop_reaches_every_shard(cluster: Cluster, queue: str):
    spread(cluster, queue, NUM_SHARDS)

    async def play() -> None:
        async with AsyncClient(cluster.url, queue=queue, shards=NUM_SHARDS) as client:
            handles = await asyncio.gather(*(client.submit("hello") for _ in range(60)))
            for shard in range(NUM_SHARDS):
                keys = Keys(queue, shard)
                await asyncio.to_thread(cluster.move, keys, another(cluster, cluster.owner(keys)))
            statuses = await asyncio.gather(*(handle.status() for handle in handles))
            assert {status.state for status in statuses} == {"queued"}
            await asyncio.gather(*(client.cancel(handle.request_id) for handle in handles))
            for handle in handles:
                with pytest.raises(Cancelled):
                    await handle.result(timeout=10)

    asyncio.run(play())


def test_the_shards_of_a_node_share_its_connections(
    cluster: Cluster, connection: redis.Redis, queue: str
):
    spread(cluster, queue, NUM_SHARDS)
    before = {node: len(node.client.client_list(_type="normal")) for node in cluster.nodes}
    for broker in 3 * brokers_of(connection, queue):
        broker.ensure_groups()
        broker.peek(count=10)
    more = [len(node.client.client_list(_type="normal")) - before[node] for node in cluster.nodes]
    # The first that was asked for the slots may keep the connection on which it was asked.
    assert max(more) <= 1, more


def test_the_work_of_a_node_does_not_grow_with_that_of_the_others(
    cluster: Cluster, connection: redis.Redis, queue: str
):
    placed = spread(cluster, queue, 3)
    brokers = brokers_of(connection, queue, 3)
    for broker in brokers:
        broker.ensure_groups()

    def commands_of(shards: list[int]) -> dict[Node, int]:
        before = {node: node.num_commands() for node in cluster.nodes}
        for shard in shards:
            for _ in range(50):
                brokers[shard].peek(count=10)
        return {node: node.num_commands() - before[node] for node in cluster.nodes}

    alone = commands_of([0])
    together = commands_of([0, 1, 2])
    assert together[placed[0]] == alone[placed[0]] > 200
    assert alone[placed[1]] == alone[placed[2]] == 0
    assert len(set(together.values())) == 1
    # The counter does see a client that asks every node.
    before = {node: node.num_commands() for node in cluster.nodes}
    for node in cluster.nodes:
        node.client.time()
    assert all(node.num_commands() == before[node] + 1 for node in cluster.nodes)


def test_a_script_that_one_node_has_lost_is_loaded_there_again(
    cluster: Cluster, connection: redis.Redis, queue: str
):
    placed = spread(cluster, queue, 3)
    with Client(connection, queue=queue, shards=3) as client:
        client.submit_many([{"prompt": "hello"}] * 30)
        placed[1].client.script_flush()
        handles = client.submit_many([{"prompt": "hello"}] * 30)
        assert {handle.status().state for handle in handles} == {"queued"}


def test_a_blocked_read_of_one_shard_delays_no_other(cluster: Cluster, queue: str):
    # Both shards are on one node, which serves other connections while one is blocked.
    first, second = Keys(queue, 0), Keys(queue, 1)
    cluster.move(second, cluster.owner(first))
    with connect(cluster.url) as connection:
        blocked, free = brokers_of(connection, queue, 2)
        blocked.ensure_groups()
        free.ensure_groups()
        over, num_blocks = threading.Event(), [0]

        def block_again() -> None:
            while not over.is_set():
                blocked.peek(count=1, block_seconds=2.0)
                num_blocks[0] += 1

        def all_in_one_block() -> bool:
            """A busy machine may need longer for one of them than a read is blocked."""
            before = num_blocks[0]
            until(lambda: cluster.owner(first).has_blocked(), "a read waits")
            for _ in range(20):
                assert free.peek(count=1) == []
            return num_blocks[0] == before

        reader = threading.Thread(target=block_again)
        reader.start()
        try:
            until(all_in_one_block, "twenty looks while one read waits")
        finally:
            over.set()
            reader.join()


def test_states_are_read_from_all_nodes_in_order(
    cluster: Cluster, connection: redis.Redis, queue: str
):
    spread(cluster, queue, NUM_SHARDS)
    brokers = brokers_of(connection, queue)
    with Client(connection, queue=queue, shards=NUM_SHARDS) as client:
        client.submit_many([{"prompt": "hello"}] * 40)
    counts = [len(broker.peek(count=100)) for broker in brokers]
    assert sum(counts) == 40
    shards = [broker.keys for broker in brokers]
    brokers[-1].pause("only here")
    (view,) = view_queues(connection, {queue: shards}, *Part)
    assert [state.num_queued for state in view.shards] == counts
    assert [state.num_tenants for state in view.sharing] == [min(1, count) for count in counts]
    assert [sum(one.num_open for one in shown) for shown in view.tenants] == counts
    assert [sum(one.tenants.values()) for one in view.backlog] == counts
    assert [one.pause_reason for one in view.control] == [None] * (NUM_SHARDS - 1) + ["only here"]
    memory = inspect_memory(connection)
    assert memory is not None
    assert memory.used_bytes >= 1_000_000


def test_one_server_is_reached_as_before(real_server: LocalRedis):
    with connect(real_server.url) as connection:
        keys = Keys("test")
        assert for_key(connection, keys.prefix) is connection
        assert Broker(connection).node == ""


def test_a_url_of_the_other_kind_is_answered_with_the_right_one(
    cluster: Cluster, real_server: LocalRedis, queue: str
):
    keys = Keys(queue)
    node = another(cluster, cluster.owner(keys))
    with (
        connect(f"redis://127.0.0.1:{node.port}/0") as connection,
        pytest.raises(BrokerUnavailable, match=r"redis\+cluster://"),
    ):
        Broker(connection, queue=queue).status("some")
    url = real_server.url.replace("redis://", "redis+cluster://").removesuffix("0")
    with (
        connect(url) as connection,
        pytest.raises(BrokerUnavailable, match="no node of a cluster: use a url with redis://"),
    ):
        Broker(connection, queue=queue).status("some")


def test_no_node_at_all_is_an_outage():
    with (
        connect("redis+cluster://127.0.0.1:1,127.0.0.1:2/") as connection,
        pytest.raises(BrokerUnavailable, match="no node of the cluster can be used"),
    ):
        Broker(connection, retry_seconds=0.0).status("some")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+cluster://a:1/1", "only the database 0"),
        ("redis+cluster://a:1,:b/", "write each host as host or host:port"),
        ("redis+cluster://a:1/?ssl_ca_certs=x", r"for the scheme rediss\+cluster"),
        ("redis+cluster://a:1/?db=1", "a cluster url has no option 'db'"),
        ("rediss+cluster://a:1/?ssl_nothing=1", "invalid option"),
    ],
)
def test_a_wrong_url_says_what_is_wrong(url: str, message: str):
    with pytest.raises(ValueError, match=message):
        connect(url)
