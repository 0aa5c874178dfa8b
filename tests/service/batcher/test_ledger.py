"""The transitions of files and batches, one by one, on a real Redis."""

import pytest

from quire.queue.view.view import batches
from service.shared.batches import ledger
from service.shared.batches.ledger import Hold, Ledger, ResultFile
from tests.service.builders import Queue

FILE, BATCH = "file-1", "batch_1"
FIELDS = {"endpoint": "/v1/completions", "input_file_id": FILE, "completion_window": "1m"}


class Records:
    """The transitions of one queue, as a test calls them."""

    def __init__(self, queue: Queue) -> None:
        self._ledger = Ledger(queue.connection, queue.name)
        self.keys = self._ledger.keys
        self.connection = queue.connection

    def run(self, procedure):
        return self._ledger.run(procedure)

    def publish(self, name: str = FILE, *, max_files: int = 9) -> str:
        fields = {"purpose": "batch", "filename": "f", "bytes": 1}
        return self.run(
            ledger.publish_file(
                self.keys, name, tenant="t", seconds=60, max_files=max_files, fields=fields
            )
        )

    def upload(self, name: str = FILE) -> None:
        self.run(ledger.reserve_file(self.keys, name, tenant="t"))
        assert self.publish(name) == "published"

    def create(self, *, digest: str = "d", name: str = BATCH, max_open: int = 9) -> str:
        return self.run(
            ledger.create_batch(
                self.keys,
                name,
                tenant="t",
                digest=digest,
                input_file_id=FILE,
                window_ms=60_000,
                max_open=max_open,
                max_records=9,
                fields=FIELDS,
            )
        )

    def claim(self, *, lease_ms: int = 60_000) -> Hold | None:
        return self.run(ledger.claim_batch(self.keys, BATCH, lease_ms=lease_ms))

    def save(self, hold: Hold, **others) -> str:
        return self.run(ledger.save_batch(self.keys, hold, **{"lease_ms": 60_000} | others))

    def cancel(self) -> str:
        return self.run(ledger.cancel_batch(self.keys, BATCH))

    def finish(self, hold: Hold, status: str = "completed") -> str:
        record = self.record
        return self.run(
            ledger.finish_batch(
                self.keys,
                hold,
                record,
                status=status,
                keep_ms=60_000,
                output_ms=60_000,
                output=ResultFile("file-2", 5),
                errors=ResultFile(),
                fields={"completed": 1},
            )
        )

    @property
    def record(self):
        record = self.run(ledger.read_batch(self.keys, BATCH))
        assert record is not None
        return record

    def free(self) -> list[str]:
        return self.run(ledger.free_batches(self.keys, count=9))


@pytest.fixture
def records(queue) -> Records:
    return Records(queue)


def test_a_reserved_file_is_seen_by_nobody_until_it_is_published(records):
    records.run(ledger.reserve_file(records.keys, FILE, tenant="t"))
    assert records.run(ledger.read_file(records.keys, FILE)) is None
    assert records.publish() == records.publish() == "published"
    assert records.run(ledger.read_file(records.keys, FILE)).filename == "f"


def test_a_file_whose_reservation_was_given_up_is_not_published(records):
    assert records.publish() == ""
    records.run(ledger.reserve_file(records.keys, FILE, tenant="t"))
    records.connection.zadd(records.keys.batch_ends, {f"file:{FILE}": 1})
    assert records.run(ledger.due_ends(records.keys, count=9)) == [("file", FILE, "t")]
    assert records.run(ledger.delete_file(records.keys, FILE, tenant="t")) == "deleted"
    assert records.publish() == ""


def test_a_cancellation_is_not_replaced_by_what_the_batcher_was_about_to_do(records):
    records.upload()
    records.create()
    hold = records.claim()
    assert records.save(hold, status="in_progress") == "in_progress"
    assert records.cancel() == records.cancel() == "cancelling"
    assert records.save(hold, status="finalizing") == "cancelling"
    assert records.finish(hold) == "cancelled"
    assert records.record.status == "cancelled"
    assert records.cancel() == "cancelled"


def test_only_the_holder_writes(records):
    records.upload()
    records.create()
    first = records.claim()
    assert records.claim() is None, "the lease goes on"
    assert records.save(first, lease_ms=1) == "validating"
    while not records.free():
        pass
    second = records.claim()
    assert second.epoch == first.epoch + 1
    before = records.record
    assert records.save(first, fields={"offset": 7}) == ""
    assert records.finish(first) == ""
    assert records.record == before
    assert records.save(second, fields={"offset": 7}) == "validating"
    assert records.record.offset == 7


def test_a_batch_that_is_given_back_can_be_claimed_at_once(records):
    records.upload()
    records.create()
    hold = records.claim()
    assert records.free() == []
    assert records.save(hold, lease_ms=0) == "validating"
    assert records.free() == [BATCH]
    assert records.save(hold) == "", "it is not held any more"


def test_the_end_of_a_batch_is_written_once_and_can_be_asked_for_again(records):
    records.upload()
    records.create()
    hold = records.claim()
    assert records.run(ledger.delete_file(records.keys, FILE, tenant="t")) == "used"
    assert records.finish(hold) == records.finish(hold) == "completed"
    assert records.record.output_file_id == "file-2"
    output = records.run(ledger.read_file(records.keys, "file-2"))
    assert (output.purpose, output.num_bytes, output.tenant) == ("batch_output", 5, "t")
    assert records.run(batches([records.keys])) == [(0, 0)]
    assert not records.connection.exists(records.keys.open_batches), "counted once"
    assert records.run(ledger.delete_file(records.keys, FILE, tenant="t")) == "deleted"
    assert records.claim() is None


def told(records: Records) -> list[tuple[str, str]]:
    """Batch and state of the ends that the queue has told."""
    entries = records.connection.xrange(records.keys.ends)
    return [(fields[b"batch"].decode(), fields[b"state"].decode()) for _, fields in entries]


def test_the_end_of_a_batch_is_told_once_by_the_script_that_ends_it(records):
    records.upload()
    records.create()
    hold = records.claim()
    assert told(records) == []
    assert records.finish(hold) == records.finish(hold) == "completed"
    assert told(records) == [(BATCH, "completed")]
    records.connection.hset(records.keys.control, "ends", 0)
    records.upload()
    records.create(name="batch_2")
    hold = records.run(ledger.claim_batch(records.keys, "batch_2", lease_ms=60_000))
    assert records.run(fail_batch(records, hold)) == "failed"
    assert told(records) == [(BATCH, "completed")], "0 tells none"


def fail_batch(records: Records, hold: Hold):
    return ledger.finish_batch(
        records.keys,
        hold,
        records.record,
        status="failed",
        keep_ms=60_000,
        output_ms=60_000,
        output=ResultFile(),
        errors=ResultFile(),
        fields={},
    )


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_end_that_a_torn_file_lacks_is_told_by_the_next_claim(records, is_lost):
    records.upload()
    records.create()
    records.finish(records.claim())
    # What a torn file holds: the status, perhaps its end, and nothing after it.
    records.connection.zadd(records.keys.batch_work, {BATCH: 1})
    if is_lost:
        records.connection.delete(records.keys.ends)
    assert records.claim() is None
    assert told(records) == [(BATCH, "completed")]
    assert records.free() == []


def test_a_batch_is_created_once_for_its_id(records):
    assert records.create() == "no_file"
    records.upload()
    assert [records.create(), records.create(), records.create(digest="e")] == [
        "created",
        "known",
        "different",
    ]
    assert records.run(ledger.read_file(records.keys, FILE)).uses == 1
    assert records.create(name="batch_2", max_open=1) == "full"


def listed(records, *, after=None, is_ascending, kind="files"):
    read = ledger.list_files if kind == "files" else ledger.list_batches
    part = records.run(read(records.keys, "t", after=after, is_ascending=is_ascending, count=9))
    return None if part is None else [record.id for record in part.records]


@pytest.mark.parametrize("is_ascending", [True, False])
@pytest.mark.parametrize("is_moment_shared", [True, False])
def test_a_list_goes_on_after_what_was_deleted(records, is_ascending, is_moment_shared):
    names = [f"file-{number}" for number in range(5)]
    for number, name in enumerate(names):
        records.upload(name)
        moment = 1 if is_moment_shared else number
        records.connection.zadd(records.keys.files("t"), {name: moment})
    ordered = names if is_ascending else names[::-1]
    for number, name in enumerate(ordered):
        records.run(ledger.delete_file(records.keys, name, tenant="t"))
        records.run(ledger.forget_file(records.keys, name, tenant="t"))
        rest = ordered[number + 1 :]
        for gone in ordered[: number + 1]:
            assert listed(records, after=gone, is_ascending=is_ascending) == rest
    assert listed(records, after="file-9", is_ascending=is_ascending) is None
    # Not for ever, and not any number of them.
    assert 0 < records.connection.pttl(records.keys.deleted_files("t")) <= 86_400_000


@pytest.mark.parametrize("fields", [{"created": b"\xff"}, {"created": "inf"}, {"made": 1}])
def test_a_place_that_no_script_wrote_is_none(records, fields):
    records.connection.xadd(records.keys.deleted_files("t"), {"id": FILE, **fields})
    records.connection.expire(records.keys.deleted_files("t"), 60)
    assert listed(records, after=FILE, is_ascending=True) is None


def test_the_places_of_few_deleted_files_are_kept(records):
    names = [f"file-{number}" for number in range(1400)]
    records.connection.zadd(records.keys.files("t"), dict.fromkeys(names, 1))
    for name in names:
        records.run(ledger.forget_file(records.keys, name, tenant="t"))
    assert 1000 <= records.connection.xlen(records.keys.deleted_files("t")) < 1200
    assert listed(records, after=names[400], is_ascending=True) == []
    assert listed(records, after=names[0], is_ascending=True) is None


@pytest.mark.parametrize("is_ascending", [True, False])
def test_batches_come_in_both_orders_and_after_one_that_was_deleted(records, is_ascending):
    records.upload()
    names = [f"batch_{number}" for number in range(4)]
    for number, name in enumerate(names):
        records.create(name=name)
        records.connection.zadd(records.keys.batches("t"), {name: number})
    ordered = names if is_ascending else names[::-1]
    assert listed(records, is_ascending=is_ascending, kind="batches") == ordered
    records.run(ledger.forget_batch(records.keys, ordered[1], tenant="t"))
    after = listed(records, after=ordered[1], is_ascending=is_ascending, kind="batches")
    assert after == ordered[2:]
