"""Commits of several shards of one node over one connection."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import redis

from quire import Client, connect
from quire.keys import Keys
from quire.queue.broker import Broker
from quire.queue.claim.claim import Claimed
from quire.queue.publish.commit import CommitItem
from quire.queue.request.claims import Claim
from tests.quire.clusters import Cluster

pytestmark = pytest.mark.real_redis

NUM_SHARDS = 3


@pytest.fixture
def connection(cluster: Cluster) -> Iterator[redis.Redis]:
    with connect(cluster.url) as made:
        yield made


@pytest.fixture
def brokers(cluster: Cluster, connection: redis.Redis) -> list[Broker]:
    """All shards of a queue on one node."""
    queue = f"test-{secrets.token_hex(6)}"
    brokers = [Broker(connection, queue=queue, shard=shard) for shard in range(NUM_SHARDS)]
    for broker in brokers:
        cluster.move(broker.keys, cluster.owner(Keys(queue)))
        broker.ensure_groups()
    return brokers


def claims_of(brokers: list[Broker]) -> list[Claim]:
    """One claim of each shard, whose first token is committed, so that EXTEND may add the next."""
    claims = []
    for broker in brokers:
        with Client(broker) as client:
            client.submit("hello", sampling={"max_tokens": 8})
        (claimed,) = broker.claim(broker.peek(count=1))
        assert isinstance(claimed, Claimed)
        broker.commit([CommitItem(claimed.claim, 0, (1,), "a")])
        claims.append(claimed.claim)
    return claims


def published(brokers: list[Broker], claims: list[Claim]) -> list[int]:
    return [
        broker.status(claim.request_id).published
        for broker, claim in zip(brokers, claims, strict=True)
    ]


def test_shards_of_a_node_are_committed_in_one_round_trip(cluster: Cluster, brokers: list[Broker]):
    claims = claims_of(brokers)
    items = [[CommitItem(claim, 1, (2,), "b")] for claim in claims]
    with brokers[0].sharing() as shared:
        begun = [broker.begin(part, shared) for broker, part in zip(brokers, items, strict=True)]
        # All calls are on their way before the first reply is read.
        node = cluster.owner(brokers[0].keys)
        assert {broker.node for broker in brokers} == {f"127.0.0.1:{node.port}"}
        replies = [
            broker.commit(part, begun=one)
            for broker, part, one in zip(brokers, items, begun, strict=True)
        ]
    assert [[one.published for one in part] for part in replies] == [[2]] * NUM_SHARDS
    assert published(brokers, claims) == [2] * NUM_SHARDS


def test_a_connection_that_breaks_between_loses_and_repeats_nothing(
    cluster: Cluster, brokers: list[Broker]
):
    claims = claims_of(brokers)
    items = [[CommitItem(claim, 1, (2,), "b")] for claim in claims]
    with brokers[0].sharing() as shared:
        begun = [broker.begin(part, shared) for broker, part in zip(brokers, items, strict=True)]
        # Redis closes the connection after it has run what has arrived, so replies are lost.
        cluster.owner(brokers[0].keys).client.client_kill_filter(_type="normal", skipme=True)
        for broker, part, one in zip(brokers, items, begun, strict=True):
            assert [reply.published for reply in broker.commit(part, begun=one)] == [2]
    assert published(brokers, claims) == [2] * NUM_SHARDS
    logs = [
        broker.read_output({claim.request_id: 0})
        for broker, claim in zip(brokers, claims, strict=True)
    ]
    for log, claim in zip(logs, claims, strict=True):
        assert [chunk.text for chunk in log[claim.request_id].chunks] == ["a", "b"]


def test_a_slot_that_moves_between_is_committed_at_its_new_node(
    cluster: Cluster, brokers: list[Broker]
):
    claims = claims_of(brokers)
    items = [[CommitItem(claim, 1, (2,), "b")] for claim in claims]
    others = [node for node in cluster.masters() if node is not cluster.owner(brokers[1].keys)]
    cluster.move(brokers[1].keys, others[0])
    with brokers[0].sharing() as shared:
        begun = [broker.begin(part, shared) for broker, part in zip(brokers, items, strict=True)]
        for broker, part, one in zip(brokers, items, begun, strict=True):
            assert [reply.published for reply in broker.commit(part, begun=one)] == [2]
    assert published(brokers, claims) == [2] * NUM_SHARDS


def test_replies_are_not_read_out_of_order(brokers: list[Broker]):
    claims = claims_of(brokers)
    with brokers[0].sharing() as shared:
        begun = [
            broker.begin([CommitItem(claim, 1, (2,), "b")], shared)
            for broker, claim in zip(brokers, claims, strict=True)
        ]
        with pytest.raises(AssertionError, match="in the order of the calls"):
            brokers[1].commit([CommitItem(claims[1], 1, (2,), "b")], begun=begun[1])
