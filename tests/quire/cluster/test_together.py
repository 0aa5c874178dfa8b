"""Commits of several shards of one node over one connection."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import redis

from quire import Client, connect
from quire.errors import BrokerUnavailable, ProtocolError, QuireError
from quire.keys import Keys
from quire.queue.broker import Broker
from quire.queue.claim.claim import Claimed
from quire.queue.publish.commit import CommitItem
from quire.queue.request.claims import Claim
from quire.queue.scripts import load_source
from quire.wire.output import Activity
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


def items_of(claims: list[Claim]) -> list[list[CommitItem]]:
    """The second token of each."""
    return [[CommitItem(claim, 1, (2,), "b")] for claim in claims]


def committed(brokers: list[Broker], items: list[list[CommitItem]]) -> list[list[int]]:
    """Commits them together, and returns how many tokens the log of each item has."""
    (broker, first), *others = zip(brokers, items, strict=True)
    found = broker.commit_with(first, others)
    errors = [one for one in found if isinstance(one, QuireError)]
    assert errors == []
    return [[reply.published for reply in replies] for replies in found]


def test_shards_of_a_node_are_committed_in_one_round_trip(
    cluster: Cluster, brokers: list[Broker], monkeypatch: pytest.MonkeyPatch
):
    claims = claims_of(brokers)
    node = cluster.owner(brokers[0].keys)
    assert {broker.node for broker in brokers} == {f"127.0.0.1:{node.port}"}
    brokers[0].connection.script_load(load_source("extend"))
    sent, execute = [], redis.client.Pipeline.execute

    def noting(pipeline, *arguments, **options):
        sent.append(len(pipeline.command_stack))
        return execute(pipeline, *arguments, **options)

    monkeypatch.setattr(redis.client.Pipeline, "execute", noting)
    assert committed(brokers, items_of(claims)) == [[2]] * NUM_SHARDS
    assert sent == [NUM_SHARDS]
    assert published(brokers, claims) == [2] * NUM_SHARDS


def test_what_extend_may_not_add_is_decided_by_its_own_shard(brokers: list[Broker]):
    claims = claims_of(brokers)
    items = items_of(claims)
    items[1] = [CommitItem(claims[1], 1, (2,), "b", activity=Activity.DECODING)]
    assert committed(brokers, items) == [[2]] * NUM_SHARDS
    assert published(brokers, claims) == [2] * NUM_SHARDS


def test_a_shard_that_fails_does_not_fail_the_others(brokers: list[Broker]):
    claims = claims_of(brokers)
    key = brokers[1].keys.output(claims[1].request_id)
    brokers[1].connection.delete(key)
    brokers[1].connection.set(key, "foreign", ex=60)
    (broker, first), *others = zip(brokers, items_of(claims), strict=True)
    one, spoilt, other = broker.commit_with(first, others)
    assert isinstance(spoilt, ProtocolError)
    assert [reply.published for found in (one, other) for reply in found] == [2, 2]


def test_a_connection_that_breaks_loses_and_repeats_nothing(
    brokers: list[Broker], monkeypatch: pytest.MonkeyPatch
):
    claims = claims_of(brokers)
    read = redis.connection.Connection.read_response

    def broken(connection, *arguments, **options):
        # The server has run what was sent; its replies are lost.
        read(connection, *arguments, **options)
        connection.disconnect()
        raise redis.ConnectionError("the connection is gone")

    (broker, first), *others = zip(brokers, items_of(claims), strict=True)
    with monkeypatch.context() as patch:
        patch.setattr(redis.connection.Connection, "read_response", broken)
        with pytest.raises(BrokerUnavailable):
            broker.commit_with(first, others)
    for one, items in zip(brokers, items_of(claims), strict=True):
        assert [reply.published for reply in one.commit(items)] == [2]
    logs = [
        broker.read_output({claim.request_id: 0})
        for broker, claim in zip(brokers, claims, strict=True)
    ]
    for log, claim in zip(logs, claims, strict=True):
        assert [chunk.text for chunk in log[claim.request_id].chunks] == ["a", "b"]


def test_a_slot_that_moves_meanwhile_is_for_the_caller_to_commit_alone(
    cluster: Cluster, brokers: list[Broker]
):
    claims = claims_of(brokers)
    others = [node for node in cluster.masters() if node is not cluster.owner(brokers[1].keys)]
    cluster.move(brokers[1].keys, others[0])
    with pytest.raises(BrokerUnavailable, match="moved"):
        committed(brokers, items_of(claims))
    assert brokers[1].node != brokers[0].node, "the next commit is not sent together"
    for broker, items in zip(brokers, items_of(claims), strict=True):
        assert [reply.published for reply in broker.commit(items)] == [2]
    assert published(brokers, claims) == [2] * NUM_SHARDS
