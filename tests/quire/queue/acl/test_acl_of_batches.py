"""Gateways and batchers as the users of docs/reference/acl.md."""

import json

import pytest

from quire.queue.view.view import batches
from service.batcher.destinations import Destinations
from service.batcher.job import Job
from service.batcher.settings import BatcherSettings
from service.shared.batches import ledger
from service.shared.batches.ledger import Ledger
from service.shared.batches.storage import FolderStorage
from tests.quire.queue.acl.roles import refused

#: What is forbidden is said in other words by other servers.
pytestmark = [pytest.mark.real_redis, pytest.mark.distribution]


def test_a_gateway_keeps_the_records_of_files(as_role, real_server, real_broker):
    broker = as_role("gateway")
    records = Ledger(broker.connection, broker.keys.queue)
    keys = records.keys
    file_id = "file-1"
    records.run(ledger.reserve_file(keys, file_id, tenant="t"))
    fields = {"purpose": "batch", "filename": "f", "bytes": 1}
    published = ledger.publish_file(
        keys, file_id, tenant="t", seconds=60, max_files=9, fields=fields
    )
    assert records.run(published) == "published"
    assert records.run(ledger.read_file(keys, file_id)).filename == "f"
    for is_ascending in (True, False):
        listed = ledger.list_files(keys, "t", after=file_id, is_ascending=is_ascending, count=1)
        assert records.run(listed).records == []
    assert records.run(ledger.delete_file(keys, file_id, tenant="t")) == "deleted"
    records.run(ledger.forget_file(keys, file_id, tenant="t"))
    listed = ledger.list_files(keys, "t", after=file_id, is_ascending=True, count=1)
    assert records.run(listed).records == []
    producer = Ledger(as_role("producer").connection, broker.keys.queue)
    refused(lambda: producer.run(ledger.read_file(keys, file_id)))


def test_a_gateway_makes_a_batch_and_a_batcher_runs_it(as_role, tmp_path, real_broker):
    gateway, batcher = as_role("gateway"), as_role("batcher")
    records = Ledger(gateway.connection, gateway.keys.queue)
    keys, storage = records.keys, FolderStorage(tmp_path / "files")
    source = tmp_path / "in.jsonl"
    body = {"prompt": "x", "max_tokens": 1}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    source.write_text(json.dumps(line) + "\n")
    storage.put("file-1", source)
    fields = {"purpose": "batch", "filename": "f", "bytes": source.stat().st_size}
    records.run(ledger.reserve_file(keys, "file-1", tenant="t"))
    records.run(
        ledger.publish_file(keys, "file-1", tenant="t", seconds=60, max_files=9, fields=fields)
    )
    created = ledger.create_batch(
        keys,
        "batch_1",
        tenant="t",
        digest="d",
        input_file_id="file-1",
        window_ms=60_000,
        max_open=1,
        max_records=9,
        fields={
            "endpoint": "/v1/completions",
            "input_file_id": "file-1",
            "completion_window": "1m",
        },
    )
    assert records.run(created) == "created"
    held = Ledger(batcher.connection, batcher.keys.queue)
    assert held.run(ledger.free_batches(keys, count=9)) == ["batch_1"]
    hold = held.run(ledger.claim_batch(keys, "batch_1", lease_ms=10_000))
    record = held.run(ledger.read_batch(keys, "batch_1"))
    settings = BatcherSettings(queue=gateway.keys.queue, files_folder=tmp_path / "files")
    destinations = Destinations(batcher.connection, settings)
    job = Job(
        hold, record, records=held, storage=storage, destinations=destinations, settings=settings
    )
    # There is no worker: the gateway's caller cancels it.
    assert records.run(ledger.cancel_batch(keys, "batch_1")) == "cancelling"
    assert job.run() == "cancelled"
    assert held.run(batches([keys])) == [(0, 0)]
    listed = records.run(ledger.list_batches(keys, "t", after=None, is_ascending=False, count=9))
    error_file = listed.records[0].error_file_id
    assert held.run(ledger.due_ends(keys, count=9)) == []
    assert records.run(ledger.delete_file(keys, error_file, tenant="t")) == "deleted"
    for name in (error_file, "file-1"):
        held.run(ledger.delete_file(keys, name, tenant="t"))
        held.run(ledger.forget_file(keys, name, tenant="t"))
    held.run(ledger.forget_batch(keys, "batch_1", tenant="t"))
    for call in (lambda: batcher.peek(count=1, block_seconds=0), batcher.pause):
        refused(call)
