"""What a commit of a worker asks of each node, counted at up to 64 nodes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
from redis.connection import AbstractConnection

from engine.port import RequestOutput
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from quire import connect
from quire.errors import BrokerUnavailable, QuireError
from quire.queue.broker import Broker
from quire.queue.claim.claim import Claimed
from quire.queue.publish.commit import CommitItem, CommitReply
from quire.queue.scripts import load_source
from quire.wire.protocol import TokenChunk
from service.worker.observe.metrics import Metrics
from service.worker.observe.vitals import Vitals
from service.worker.outgoing.completions import Origin
from service.worker.outgoing.contact import Contact
from service.worker.outgoing.delivery import Delivery
from service.worker.outgoing.outbox import Outbox
from service.worker.outgoing.publisher import Publisher
from tests.quire.builders import make_request
from tests.quire.fake_nodes import FakeNodes

QUEUE = "many"
SCRIPTS = ("submit", "claim", "commit", "extend")
#: Shards of each node.
NUM_SHARDS = 2


@dataclass(frozen=True)
class Work:
    """What one commit asked of one node."""

    round_trips: int
    scripts: int
    others: int


class NoEngine:
    def abort(self, key: str, reason: FinishReason) -> None:
        raise AssertionError(f"{key} aborted: {reason}")


class RoundTrips:
    """Counts how often this process has sent to a port and then waited for the reply."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[int] = Counter()
        self._unanswered: set[AbstractConnection] = set()
        send, read = AbstractConnection.send_packed_command, AbstractConnection.read_response

        def counted_send(connection: AbstractConnection, *words, **options):
            self._unanswered.add(connection)
            return send(connection, *words, **options)

        def counted_read(connection: AbstractConnection, *words, **options):
            if connection in self._unanswered:
                self._unanswered.discard(connection)
                self.counts[connection.port] += 1
            return read(connection, *words, **options)

        monkeypatch.setattr(AbstractConnection, "send_packed_command", counted_send)
        monkeypatch.setattr(AbstractConnection, "read_response", counted_read)


class Worker:
    """The publisher of a worker, and a claim in each of these shards, with one token in its log."""

    def __init__(self, brokers: Mapping[int, Broker], busy: Sequence[int]) -> None:
        self._outbox = Outbox()
        vitals, metrics = Vitals(stall_timeout_seconds=60.0), Metrics(model="fake", queue=QUEUE)
        self.metrics = metrics
        self._publisher = Publisher(
            brokers,
            self._outbox,
            engine=NoEngine(),
            vitals=vitals,
            contact=Contact(vitals, metrics, silence_seconds=60.0),
            metrics=metrics,
        )
        self._requests = [self._claimed(brokers[shard], shard) for shard in busy]

    def _claimed(self, broker: Broker, shard: int) -> Request:
        broker.submit(make_request())
        (claimed,) = broker.claim(broker.peek(count=1))
        assert isinstance(claimed, Claimed)
        claim = claimed.claim
        broker.commit([CommitItem(claim, 0, (1,), "a")])
        origin = Origin(request_id=claim.request_id, model="fake")
        delivery = Delivery(claim.request_id, claim, origin, place=shard)
        delivery.recall([TokenChunk(0, (1,), "a", claim.epoch)])
        self._outbox.open(delivery)
        return Request(claim.request_id, [1], SamplingParams(max_tokens=9), arrival_time=0.0)

    def commit(self, end: FinishReason | None = None) -> None:
        """Commits the second token of each request, and with `end` its end."""
        self._outbox.put([RequestOutput(one, 1, (2,), "b", end) for one in self._requests])
        self._publisher.stop()
        self._publisher.run()
        assert self._outbox.num_unpublished_tokens == 0


@dataclass
class Counted:
    busy: list[Work]
    idle: list[Work]
    #: Connections of each node, all in all.
    connections: list[int]


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> RoundTrips:
    return RoundTrips(monkeypatch)


def counted(
    trips: RoundTrips,
    number: int,
    *,
    num_busy: int | None = None,
    end: FinishReason | None = None,
    kind: type[Broker] = Broker,
) -> Counted:
    """What a commit asks of nodes of which `num_busy`, or all, have a request in each shard."""
    with FakeNodes(number) as nodes, connect(nodes.url) as connection:
        nodes.load(*map(load_source, SCRIPTS))
        shards = nodes.shards_of_each(QUEUE, NUM_SHARDS)
        brokers = {
            shard: kind(connection, queue=QUEUE, shard=shard)
            for part in shards.values()
            for shard in part
        }
        busy = nodes.nodes[:num_busy]
        worker = Worker(brokers, [shard for node in busy for shard in shards[node]])
        nodes.forget()
        trips.counts.clear()
        worker.commit(end)
        works = [
            Work(
                trips.counts[node.port],
                scripts=node.commands["EVALSHA"],
                others=node.commands.total() - node.commands["EVALSHA"],
            )
            for node in nodes.nodes
        ]
        connections = [node.num_connections for node in nodes.nodes]
        return Counted(works[: len(busy)], works[len(busy) :], connections)


def test_the_work_of_a_node_is_the_same_at_4_and_at_64_nodes(trips: RoundTrips):
    few, many = counted(trips, 4), counted(trips, 64)
    # One call for each of its shards, all sent before the first reply is read.
    assert set(few.busy) == set(many.busy) == {Work(round_trips=1, scripts=NUM_SHARDS, others=0)}
    # The first node was asked for the slots over the same connection.
    assert many.connections == [1] * 64
    print(f"at 64 nodes: {many.busy[0]}, connections {Counter(many.connections)}")


def test_a_commit_asks_only_the_nodes_that_hold_its_requests(trips: RoundTrips):
    found = counted(trips, 16, num_busy=3)
    assert set(found.busy) == {Work(round_trips=1, scripts=NUM_SHARDS, others=0)}
    assert set(found.idle) == {Work(round_trips=0, scripts=0, others=0)}


def test_an_end_is_a_call_of_its_own_for_its_shard(trips: RoundTrips):
    found = counted(trips, 8, num_busy=3, end=FinishReason.LENGTH)
    assert set(found.busy) == {Work(round_trips=NUM_SHARDS, scripts=NUM_SHARDS, others=0)}
    assert set(found.idle) == {Work(round_trips=0, scripts=0, others=0)}


class AsksAll(Broker):
    """Asks every node for its time at each commit."""

    def commit_with(self, *shards) -> list[list[CommitReply] | QuireError]:
        for client in self.connection.nodes.masters().values():
            client.time()
        return super().commit_with(*shards)


def test_a_commit_that_asked_every_node_would_be_seen(trips: RoundTrips):
    few, many = (counted(trips, number, kind=AsksAll) for number in (4, 8))
    # Each node hears of the commits of all nodes; connections that are new send more.
    assert few.busy[-1].others >= 4
    assert many.busy[-1].others >= 8
    alone = counted(trips, 4, num_busy=1, kind=AsksAll)
    assert all(work.round_trips >= 1 for work in alone.idle)


def test_a_round_trip_for_each_shard_would_be_seen(
    trips: RoundTrips, monkeypatch: pytest.MonkeyPatch
):
    def one_after_the_other(publisher: Publisher, due) -> None:
        for shard, part in due.items():
            publisher._commit(publisher._brokers[shard], part)

    monkeypatch.setattr(Publisher, "_commit_together", one_after_the_other)
    found = counted(trips, 4)
    assert {work.round_trips for work in found.busy} == {NUM_SHARDS}


class FailsTogether(Broker):
    """The connection breaks at each commit of several shards."""

    def commit_with(self, *shards) -> list[list[CommitReply] | QuireError]:
        raise BrokerUnavailable("the connection is gone")


def test_shards_that_cannot_be_committed_together_are_so_alone_and_contact_stays():
    with FakeNodes(1) as nodes, connect(nodes.url) as connection:
        nodes.load(*map(load_source, SCRIPTS))
        (shards,) = nodes.shards_of_each(QUEUE, NUM_SHARDS).values()
        brokers = {one: FailsTogether(connection, queue=QUEUE, shard=one) for one in shards}
        worker = Worker(brokers, shards)
        worker.commit()
        assert errors_of(worker) == 0
        # A control: an error would be seen.
        worker.metrics.redis_errors["commit", "connection"].inc()
        assert errors_of(worker) == 1


def errors_of(worker: Worker) -> float:
    (family,) = (
        family
        for family in worker.metrics.registry.collect()
        if family.name == "quire_redis_errors"
    )
    return sum(one.value for one in family.samples if one.name.endswith("_total"))
