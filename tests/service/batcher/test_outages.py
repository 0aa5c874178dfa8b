"""Redis goes away or has no memory while batches run: they wait, and each line has a result."""

import json
import time
from collections.abc import Iterator

import pytest

from quire.errors import QueueFull
from quire.transport.local_redis import LocalRedis
from quire.transport.procedure import Procedure
from service.batcher import batcher as batcher_module
from service.batcher.job import MAX_FAULTS
from service.shared.batches.ledger import Ledger
from tests.service.batcher.builders import (
    batcher_of,
    create,
    ended,
    lines_of_batch,
    results_of,
    value_of,
    wanted,
)
from tests.service.batcher.conftest import Front, front_of
from tests.service.builders import Queue, WorkerThread, eventually, http_get, private_redis

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

#: Longer than a test: nothing renews it meanwhile.
LONG_SECONDS = 300.0
NUM_LINES = 40


def run_out(front, batch_id: str) -> None:
    """Let the lease of a batch end now, as an outage does that is longer."""
    front.queue.connection.zadd(front.queue.keys.batch_work, {batch_id: 1}, xx=True)


def field_of(front, batch_id: str, name: str) -> int:
    return int(front.queue.connection.hget(front.queue.keys.batch(batch_id), name) or 0)


def test_a_process_never_runs_a_batch_twice_at_once(front, gated_worker, gate):
    made = create(front.openai, *lines_of_batch(NUM_LINES))
    settings = {"lease_seconds": LONG_SECONDS, "save_seconds": LONG_SECONDS}
    with batcher_of(front.queue, front.folder, max_running_batches=3, **settings) as batcher:
        # Only its first save comes before its end.
        eventually(lambda: field_of(front, made.id, "work_epoch") == 1, "its first save")
        run_out(front, made.id)
        # A thread has seen that no lease holds it.
        eventually(lambda: value_of(batcher, "queue_batches", state="free") == 1, "it is free")
        gate.open()
        batch = ended(front.openai, made.id)
        assert field_of(front, made.id, "epoch") == 1
        assert results_of(front.openai, batch) == wanted(NUM_LINES)
        status, body = http_get(batcher.http_port, "/livez")
        assert (status, json.loads(body)["dead_threads"]) == (200, [])
    assert value_of(batcher, "claims_total", ending="completed") == 1


@pytest.fixture
def own_redis() -> Iterator[LocalRedis]:
    """A server that the test may kill or starve."""
    with private_redis() as server:
        yield server


@pytest.fixture
def own_front(own_redis, tmp_path) -> Iterator[Front]:
    queue = Queue.at(own_redis.url)
    yield from front_of(queue, tmp_path / "files")
    queue.connection.close()


def test_an_outage_that_is_longer_than_the_lease_is_borne(own_redis, own_front, gate):
    front, lease_seconds = own_front, 2.0
    made = create(front.openai, *lines_of_batch(NUM_LINES))
    settings = {"lease_seconds": lease_seconds, "max_running_batches": 3}
    with (
        WorkerThread(front.queue.settings(max_num_seqs=16), before_run=gate),
        batcher_of(front.queue, front.folder, **settings) as batcher,
    ):
        eventually(lambda: field_of(front, made.id, "work_epoch") == 1, "its first save")
        own_redis.kill()
        until = time.monotonic() + lease_seconds
        eventually(lambda: time.monotonic() > until, "the lease is over")
        own_redis.restart()
        gate.open()
        batch = ended(front.openai, made.id)
        assert results_of(front.openai, batch) == wanted(NUM_LINES)
        assert field_of(front, made.id, "epoch") == 1
        assert http_get(batcher.http_port, "/livez")[0] == 200


def write_of(procedure: Procedure) -> str:
    """What a batcher is about to write: a status, a field, or the name of the procedure."""
    given = procedure.gi_frame.f_locals
    return given.get("status") or next(iter(given.get("fields") or ()), procedure.__name__)


def test_memory_that_is_full_now_and_then_ends_no_batch(own_front, monkeypatch):
    """Each write of a claim that can end it is refused once, and one of them twice."""
    writes = ["total", "in_progress", "finalizing", "reserve_file", "completed", "finalizing"]
    assert len(writes) > MAX_FAULTS
    connection = own_front.queue.connection
    monkeypatch.setattr(batcher_module, "PAUSE_SECONDS", 0.01)
    settings = {"lease_seconds": LONG_SECONDS, "max_running_batches": 1}
    made = create(own_front.openai, *lines_of_batch(NUM_LINES))
    run = Ledger.run

    def starved(records: Ledger, procedure: Procedure):
        if not writes or write_of(procedure) != writes[0]:
            return run(records, procedure)
        del writes[0]
        connection.config_set("maxmemory", 1)
        try:
            with pytest.raises(QueueFull) as caught:
                run(records, procedure)
        finally:
            connection.config_set("maxmemory", 0)
        run_out(own_front, made.id)
        raise caught.value

    monkeypatch.setattr(Ledger, "run", starved)
    with (
        WorkerThread(own_front.queue.settings(max_num_seqs=16)),
        batcher_of(own_front.queue, own_front.folder, **settings) as batcher,
    ):
        batch = ended(own_front.openai, made.id)
        assert results_of(own_front.openai, batch) == wanted(NUM_LINES)
    assert (batch.status, batch.request_counts.completed) == ("completed", NUM_LINES)
    endings = {
        one: value_of(batcher, "claims_total", ending=one) for one in ("defect", "unavailable")
    }
    assert (writes, endings) == ([], {"defect": 0, "unavailable": 6})
