"""The command on a cluster of three real masters: each verb reaches the shards of every node."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable

import pytest

from quire import AsyncClient, Client, connect
from quire.cli import main
from quire.cli.exit_codes import EXIT_OK
from quire.keys import Keys
from quire.queue.broker import Broker
from tests.quire.clusters import Cluster, another, spread

pytestmark = pytest.mark.real_redis

NUM_SHARDS = 6

Command = Callable[..., list[dict]]


@pytest.fixture
def queue() -> str:
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def command(cluster: Cluster, queue: str, monkeypatch, capsys) -> Command:
    """Runs a command line on the queue, which must succeed; returns its records."""
    spread(cluster, queue, NUM_SHARDS)
    monkeypatch.setenv("QUIRE_REDIS_URL", cluster.url)
    monkeypatch.setenv("QUIRE_QUEUE", queue)
    monkeypatch.setenv("QUIRE_SHARDS", str(NUM_SHARDS))

    def run(*arguments: str) -> list[dict]:
        code = main([*arguments, "--json"])
        captured = capsys.readouterr()
        assert (code, captured.err) == (EXIT_OK, "")
        return [json.loads(line) for line in captured.out.splitlines()]

    return run


@pytest.mark.parametrize("verb", [("status",), ("top", "--count", "1", "--interval", "0.01")])
def test_the_state_of_every_shard_is_shown(
    cluster: Cluster, queue: str, command: Command, verb: tuple[str, ...]
):
    with Client(cluster.url, queue=queue, shards=NUM_SHARDS) as client:
        client.submit_many([{"prompt": "hello", "tenant": "acme"}] * 40)
    with connect(cluster.url) as connection:
        brokers = [Broker(connection, queue=queue, shard=shard) for shard in range(NUM_SHARDS)]
        counts = [len(broker.peek(count=100)) for broker in brokers]
    assert sum(counts) == 40
    shown = command(*verb)
    assert [row["num_queued"] for row in shown] == counts
    assert [len(row["tenants"]) for row in shown] == [min(1, count) for count in counts]


@pytest.mark.parametrize("verb", [("models",), ("models", "--all")])
def test_the_models_of_every_shard_are_shown(
    cluster: Cluster, queue: str, command: Command, verb: tuple[str, ...]
):
    with connect(cluster.url) as connection:
        for shard in range(NUM_SHARDS):
            broker = Broker(connection, queue=queue, shard=shard)
            broker.beat_worker(f"worker-{shard}", "ready", {}, model="abacus")
    (shown,) = [row for row in command(*verb) if row["queue"] == queue]
    assert shown["workers"] == [f"worker-{shard}" for shard in range(NUM_SHARDS)]


def test_the_limits_of_every_shard_are_set_and_shown(command: Command):
    command("limits", "--per-tenant", "7")
    assert len(command("limits")) == NUM_SHARDS


def test_a_queue_is_asked_at_its_own_node_over_the_connection_of_another(
    cluster: Cluster, queue: str
):
    # A gateway in front of several queues has one connection, which it takes from the first queue.
    first, second = Keys(queue), Keys(f"{queue}-2")
    node = cluster.owner(first)
    cluster.move(second, another(cluster, node))

    async def play() -> None:
        async with AsyncClient(cluster.url, queue=first.queue) as home:
            await home.submit("hello", request_id="some")
            connection = home.brokers[0].connection
            async with AsyncClient(connection, queue=second.queue) as other:
                await other.submit("hello", request_id="some")
                before = node.num_commands()
                for _ in range(20):
                    await other.status("some")
                assert node.num_commands() == before

    asyncio.run(play())
