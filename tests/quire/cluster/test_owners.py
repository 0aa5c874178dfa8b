"""Which node is believed when a client asks who owns the slots. The nodes are fakes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from quire import connect
from quire.transport import concurrency, concurrency_async
from quire.transport.cluster import redirects
from quire.transport.cluster.connection import SlotConnection
from tests.quire.fake_nodes import FakeNode, FakeNodes


@pytest.fixture
def fakes() -> Iterator[FakeNodes]:
    with FakeNodes(3) as started:
        yield started


@pytest.fixture
def connection(fakes: FakeNodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlotConnection]:
    monkeypatch.setattr(redirects, "LOOK_SECONDS", 0.0)
    with connect(fakes.url_of_all) as made:
        assert isinstance(made, SlotConnection)
        yield made


def reached(connection: SlotConnection, fakes: FakeNodes) -> list[bool]:
    """Of each node, whether the client knows that it owns its first slot."""
    return [is_reached(connection, node) for node in fakes.nodes]


def is_reached(connection: SlotConnection, node: FakeNode) -> bool:
    try:
        return connection.nodes.name_of(node.begin) == f"127.0.0.1:{node.port}"
    except RedisConnectionError:
        return False


@pytest.mark.parametrize("num_known", [0, 1, 2])
def test_if_a_node_does_not_know_all_slots_the_next_is_asked(
    fakes: FakeNodes, connection: SlotConnection, num_known: int
):
    fakes.nodes[0].knows = fakes.nodes[:num_known]
    assert reached(connection, fakes) == [True, True, True]
    assert fakes.nodes[0].commands["CLUSTER"] <= 1


def test_if_no_node_knows_all_slots_the_one_that_knows_most_is_believed(
    fakes: FakeNodes, connection: SlotConnection
):
    first, second, third = fakes.nodes
    first.knows, second.knows, third.knows = [third], [first, second], []
    # In whatever order they are asked.
    for _ in range(20):
        connection.nodes.doubt()
        assert reached(connection, fakes) == [True, True, False]


def test_slots_without_an_owner_are_asked_for_again(fakes: FakeNodes, connection: SlotConnection):
    first, second, third = fakes.nodes
    first.knows, second.knows, third.knows = [], [], []
    assert reached(connection, fakes) == [False, False, False]
    first.knows = [first]
    assert reached(connection, fakes) == [True, False, False]
    third.knows = None
    assert reached(connection, fakes) == [True, True, True]


def test_nodes_are_remembered_that_the_one_believed_does_not_know(
    fakes: FakeNodes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(redirects, "LOOK_SECONDS", 0.0)
    first, second, third = fakes.nodes
    # This url names the first node only.
    with connect(fakes.url) as connection:
        assert isinstance(connection, SlotConnection)
        assert reached(connection, fakes) == [True, True, True]
        first.knows, second.knows, third.knows = [first], [first], [first]
        connection.nodes.doubt()
        assert reached(connection, fakes) == [True, False, False]
        third.knows = None
        assert reached(connection, fakes) == [True, True, True]


def test_an_empty_answer_does_not_replace_what_is_known(
    fakes: FakeNodes, connection: SlotConnection
):
    assert reached(connection, fakes) == [True, True, True]
    for node in fakes.nodes:
        node.knows = []
    connection.nodes.doubt()
    assert reached(connection, fakes) == [True, True, True]


def test_no_node_is_always_asked_first(fakes: FakeNodes, connection: SlotConnection):
    # That one of three is never the first of so many happens once in 10**17 runs.
    for _ in range(100):
        connection.nodes.doubt()
        assert is_reached(connection, fakes.nodes[0])
    asked = [node.commands["CLUSTER"] for node in fakes.nodes]
    assert min(asked) > 0


def test_a_lock_that_is_held_is_not_waited_for():
    lock = threading.Lock()
    with concurrency.if_free(lock) as is_ours, concurrency.if_free(lock) as is_ours_too:
        assert (is_ours, is_ours_too) == (True, False)
    assert not lock.locked()

    async def play() -> None:
        lock = asyncio.Lock()
        async with (
            concurrency_async.if_free(lock) as is_ours,
            concurrency_async.if_free(lock) as is_ours_too,
        ):
            assert (is_ours, is_ours_too) == (True, False)
        assert not lock.locked()

    asyncio.run(play())
