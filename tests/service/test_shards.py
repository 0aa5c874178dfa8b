"""A worker of a queue with several shards, and of one whose ends must be on the disk."""

import re

import pytest

from quire.client.client import Client
from quire.errors import DurabilityUnavailable
from quire.queue.submit.routing import shard_of
from quire.transport.local_redis import LocalRedis
from tests.service.builders import (
    SHORT_LEASE_SECONDS,
    Queue,
    StepGate,
    WorkerThread,
    eventually,
    expected_tokens,
    private_redis,
    stays,
)
from tests.service.worker.outgoing.test_cluster import id_in

NUM_SHARDS = 3


def submit_to_all(client: Client, *, count: int = 24, max_tokens: int = 6) -> list[str]:
    """Requests, as many in each shard as in any other."""
    sampling = {"max_tokens": max_tokens}
    ids = [id_in(n % NUM_SHARDS, NUM_SHARDS, name=f"{n}") for n in range(1, count + 1)]
    rows = [
        {"prompt": [n, 7], "sampling": sampling, "request_id": id_} for n, id_ in enumerate(ids, 1)
    ]
    return [handle.request_id for handle in client.submit_many(rows)]


def test_a_worker_serves_every_shard_of_its_queue(queue: Queue):
    with Client(queue.url, queue=queue.name, shards=NUM_SHARDS) as client:
        ids = submit_to_all(client)
        with WorkerThread(queue.settings(shards=NUM_SHARDS, max_num_seqs=4)):
            results = [client.result(request_id, timeout=30.0) for request_id in ids]
    assert {shard_of(request_id, NUM_SHARDS) for request_id in ids} == set(range(NUM_SHARDS))
    for n, result in enumerate(results, start=1):
        assert len(result.token_ids) == 6
        assert result.usage.prompt_tokens == 2, n


def test_two_workers_may_part_the_shards_between_them(queue: Queue):
    with Client(queue.url, queue=queue.name, shards=NUM_SHARDS) as client:
        ids = submit_to_all(client)
        served = [(0,), (1, 2)]
        first, second = (
            WorkerThread(queue.settings(shards=NUM_SHARDS, served_shards=part)) for part in served
        )
        with first:
            done = [id_ for id_ in ids if shard_of(id_, NUM_SHARDS) == 0]
            assert 0 < len(done) < len(ids)
            for request_id in done:
                client.result(request_id, timeout=30.0)
            others = set(ids) - set(done)
            assert {client.status(request_id).state for request_id in others} == {"queued"}
            with second:
                for request_id in others:
                    client.result(request_id, timeout=30.0)


def test_claims_of_every_shard_are_renewed_reaped_and_taken_over(queue: Queue):
    gate = StepGate(steps=2)
    with Client(queue.url, queue=queue.name, shards=NUM_SHARDS) as client:
        ids = submit_to_all(client, count=9)
        short = {"lease_seconds": SHORT_LEASE_SECONDS}
        settings = queue.settings(shards=NUM_SHARDS, stall_timeout_seconds=0.2, **short)
        with WorkerThread(settings, before_run=gate) as stalled:
            eventually(lambda: stalled.get("/livez")[0] == 503)
            # Its own claims outlast a stall: each request is taken over once.
            with WorkerThread(queue.settings(shards=NUM_SHARDS)):
                results = [client.result(request_id, timeout=30.0) for request_id in ids]
            gate.open()
    assert all(len(result.token_ids) == 6 for result in results)
    assert {result.attempts for result in results} <= {1, 2}


def test_the_line_in_front_of_the_engine_is_no_longer_with_more_shards(queue: Queue):
    gate = StepGate(steps=0)
    with Client(queue.url, queue=queue.name, shards=NUM_SHARDS) as client:
        ids = submit_to_all(client, count=20, max_tokens=200)
        settings = queue.settings(shards=NUM_SHARDS, max_num_seqs=2, claim_batch=6)
        with WorkerThread(settings, before_run=gate) as worker:
            running = {"model": "fake", "state": "running"}
            gate.step_until(lambda: worker.metric("quire_engine_requests", **running) == 2)
            states = [client.status(request_id).state for request_id in ids]
            # Two run and six wait. Two intakes may have seen a room of six before the third one
            # took it all, and claim their thirds of it.
            assert states.count("running") <= 2 + 6 + 2 * (NUM_SHARDS - 1) < 2 + 6 * NUM_SHARDS
            gate.open()
            for request_id in ids:
                client.result(request_id, timeout=30.0)


def test_a_burst_ends_when_every_shard_is_empty(queue: Queue):
    with Client(queue.url, queue=queue.name, shards=NUM_SHARDS) as client:
        ids = submit_to_all(client)
        with WorkerThread(queue.settings(shards=NUM_SHARDS, burst=True)) as worker:
            assert worker.wait() == 0
        assert {client.status(request_id).state for request_id in ids} == {"completed"}


# -- durability -----------------------------------------------------------------------------------


def test_a_durable_worker_serves_where_the_server_writes_before_it_answers():
    with private_redis() as server:
        queue = Queue.at(server.url)
        request_id = queue.submit((3, 3), max_tokens=5)
        with WorkerThread(queue.settings(durable=True)):
            assert queue.result(request_id).token_ids == expected_tokens((3, 3), max_tokens=5)


def test_a_durable_worker_refuses_a_server_that_promises_nothing():
    with LocalRedis.start() as server:
        if server.kind in ("url", "fake"):
            pytest.skip("the test needs a server of its own that does not write to disk")
        queue = Queue.at(server.url)
        request_id = queue.submit((3, 3), max_tokens=5)
        gate = StepGate(steps=0)
        with WorkerThread(queue.settings(durable=True), before_run=gate) as worker:
            death = eventually(lambda: worker.worker.death)
            gate.open()
            assert worker.wait() == 2
        assert death is not None
        assert isinstance(death.error, DurabilityUnavailable)
        # What the server itself says since Redis 7.2, and what is said for it before.
        assert re.search("appendfsync always|appendonly is disabled", str(death.error))
        assert not queue.broker.status(request_id).state.is_terminal


def test_a_worker_that_can_claim_and_not_commit_leaves_most_of_the_queue_to_others(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("service.worker.incoming.intake.MAX_ENDED_CLAIMS", 8)
    with private_redis() as server:
        queue = Queue.at(server.url)
        settings = queue.settings(durable=True, max_num_seqs=4, claim_batch=2)
        with WorkerThread(settings) as worker:
            queue.result(queue.submit((1, 1), max_tokens=2))
            # Nothing can be ended from now on, and everything else goes on.
            queue.connection.config_set("appendonly", "no")
            ids = [queue.submit((n, 1), max_tokens=2) for n in range(1, 61)]

            def num_held() -> int:
                return len(worker.worker._outbox.claims())

            # A read of one class may bring a few more than there is room for.
            eventually(lambda: num_held() >= 4 + 2 + 8)
            stays(lambda: num_held() <= 4 + 2 + 8 + 2)
            assert sum(queue.broker.queue_depth().values()) >= 60 - (4 + 2 + 8 + 2)
            queue.connection.config_set("appendonly", "yes")
            for n, request_id in enumerate(ids, start=1):
                assert queue.result(request_id).token_ids == expected_tokens((n, 1), max_tokens=2)
