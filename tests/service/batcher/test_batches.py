"""`/v1/batches` with OpenAI's own client, a batcher and a worker with a fake model."""

import json

import pytest
from openai import APIStatusError, BadRequestError, NotFoundError, OpenAI

from service.shared.batches import ledger
from service.shared.batches.ledger import Ledger
from tests.service.batcher.builders import (
    ENDPOINT,
    batcher_of,
    create,
    ended,
    expected_text,
    line,
    lines_in,
    results_of,
    upload,
)
from tests.service.builders import StepGate, WorkerThread, eventually

pytestmark = pytest.mark.timeout(120)


def test_a_batch_runs_to_its_end_and_the_unchanged_client_reads_it(front, worker):
    openai = front.openai
    lines = [line(f"row-{n}", max_tokens=n % 5 + 1) for n in range(40)]
    bad = line("bad", top_p=7)
    made = create(
        openai,
        *lines,
        bad,
        metadata={"run": "nightly"},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (made.object, made.status, made.endpoint) == ("batch", "validating", ENDPOINT)
    assert made.expires_at - made.created_at == 86_400
    with batcher_of(front.queue, front.folder):
        batch = ended(openai, made.id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (41, 40, 1)
    assert batch.metadata == {"run": "nightly"}
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    wanted = {f"row-{n}": expected_text(n % 5 + 1) for n in range(40)}
    assert results_of(openai, batch) == wanted | {"bad": "invalid_request"}
    usages = [one["response"]["body"]["usage"] for one in lines_in(openai, batch.output_file_id)]
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages) > 0
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages) > 0
    output = openai.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.expires_at - output.created_at) == ("batch_output", 3600)
    assert output.bytes == len(openai.files.content(output.id).read())
    assert [one.id for one in openai.batches.list()] == [made.id]
    assert not list(front.folder.glob("work/*")), "the work of an ended batch is deleted"


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        (["nonsense", "[]"], ["invalid_json_line", "invalid_json_line"]),
        ([line("a"), line("a")], ["duplicate_custom_id"]),
        ([{**line("a"), "url": "/v1/chat/completions"}], ["mismatched_url"]),
        ([" "], ["empty_file"]),
    ],
)
def test_a_bad_file_fails_the_batch_and_names_the_lines(front, lines, codes):
    made = create(front.openai, *lines)
    with batcher_of(front.queue, front.folder):
        batch = ended(front.openai, made.id)
    assert batch.status == "failed" and batch.failed_at
    assert [error.code for error in batch.errors.data] == codes
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert front.openai.files.delete(made.input_file_id).deleted, "no batch uses it any more"


@pytest.mark.parametrize("num_lines", [0, 1])
def test_an_input_that_the_storage_has_lost_in_part_fails_the_batch(front, num_lines):
    """With fewer lines than its caller sent, it would look complete."""
    made = create(front.openai, line("a"), line("b"))
    content = front.folder / "files" / made.input_file_id
    kept = content.read_bytes().splitlines(keepends=True)[:num_lines]
    content.unlink()
    if kept:
        content.write_bytes(b"".join(kept))
    with batcher_of(front.queue, front.folder):
        batch = ended(front.openai, made.id)
    assert batch.status == "failed"
    assert [error.code for error in batch.errors.data] == ["input_file_missing"]


def test_a_model_that_no_record_can_hold_fails_its_line_alone(front, worker):
    made = create(front.openai, line("bad", model="\ud800"), line("good"))
    with batcher_of(front.queue, front.folder):
        batch = ended(front.openai, made.id)
    assert batch.status == "completed"
    assert results_of(front.openai, batch) == {"bad": "invalid_request", "good": expected_text()}


def test_requests_can_be_in_the_body(front, worker):
    requests = [line("a"), line("b", max_tokens=2)]
    made = front.openai.batches.create(
        input_file_id=None,
        endpoint=ENDPOINT,
        completion_window="1h",
        extra_body={"requests": requests},
    )
    assert made.expires_at - made.created_at == 3600
    with batcher_of(front.queue, front.folder):
        batch = ended(front.openai, made.id)
    assert results_of(front.openai, batch) == {"a": expected_text(), "b": expected_text(2)}


def test_a_cancelled_batch_keeps_what_is_finished_and_each_line_has_one_result(front):
    openai = front.openai
    made = create(openai, *(line(f"row-{n}") for n in range(20)))
    with batcher_of(front.queue, front.folder):
        eventually(lambda: openai.batches.retrieve(made.id).status == "in_progress", "it has begun")
        first = eventually(lambda: front.queue.connection.hlen(front.queue.keys.open), "submitted")
        assert first
        assert openai.batches.cancel(made.id).status == "cancelling"
        batch = ended(openai, made.id)
    assert batch.status == "cancelled" and batch.cancelling_at <= batch.cancelled_at
    assert set(results_of(openai, batch).values()) == {"batch_cancelled"}
    assert batch.request_counts.failed == 20
    assert front.queue.connection.hlen(front.queue.keys.open) == 0, "its requests are cancelled"
    assert openai.batches.cancel(made.id).status == "cancelled"


def test_an_expired_batch_keeps_its_finished_lines(front, queue):
    openai, gate = front.openai, StepGate(steps=0)
    made = create(openai, line("quick", max_tokens=1), line("slow", max_tokens=10_000))
    with WorkerThread(queue.settings(), before_run=gate):
        with batcher_of(front.queue, front.folder, max_inflight=1):
            gate.step_until(lambda: openai.batches.retrieve(made.id).request_counts.completed == 1)
        # Its time is over before another batcher takes it up.
        front.queue.connection.hset(front.queue.keys.batch(made.id), "expires_ms", 1)
        with batcher_of(front.queue, front.folder):
            batch = ended(openai, made.id)
        gate.open()
    assert batch.status == "expired" and batch.expired_at
    assert results_of(openai, batch) == {"quick": expected_text(1), "slow": "batch_expired"}


def test_lists_of_batches_come_in_both_orders_and_over_lost_records(front):
    openai = front.openai
    made = [create(openai, line("a")).id for _ in range(5)]
    index = front.queue.keys.batches("default")
    front.queue.connection.zadd(index, {name: number for number, name in enumerate(made)})
    for order, wanted in (("asc", made), ("desc", made[::-1])):
        listed = openai.batches.list(limit=2, extra_query={"order": order})
        assert [one.id for one in listed] == wanted
    # Its place in the list is kept although Redis has lost the record.
    front.queue.connection.delete(front.queue.keys.batch(made[2]))
    assert [one.id for one in openai.batches.list(limit=2)] == [made[n] for n in (4, 3, 1, 0)]
    with pytest.raises(BadRequestError) as refused:
        openai.batches.list(extra_query={"order": "newest"})
    assert refused.value.param == "order"


def test_a_repeated_call_with_a_key_finds_the_batch(front):
    file_id = upload(front.openai, line("a"))

    def make(window: str = "24h"):
        return front.openai.batches.create(
            input_file_id=file_id,
            endpoint=ENDPOINT,
            completion_window=window,
            extra_headers={"Idempotency-Key": "k"},
        )

    assert make() == make()
    with pytest.raises(APIStatusError) as refused:
        make("1h")
    assert (refused.value.status_code, refused.value.code) == (422, "idempotency_key_reused")
    assert len(front.openai.batches.list().data) == 1


def test_the_input_of_an_open_batch_cannot_be_deleted(front):
    made = create(front.openai, line("a"))
    with pytest.raises(BadRequestError, match="reads the file"):
        front.openai.files.delete(made.input_file_id)
    front.openai.batches.cancel(made.id)
    with batcher_of(front.queue, front.folder):
        ended(front.openai, made.id)
    assert front.openai.files.delete(made.input_file_id).deleted


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint", "/v1/embeddings/none"),
        ("completion_window", "8d"),
        ("completion_window", "soon"),
        ("endpoint", ["/v1/completions"]),
        ("metadata", {"a": 1}),
        ("metadata", {"a": "\ud800"}),
        ("metadata", {"\ud800": "a"}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 1}),
        ("color", "red"),
    ],
)
def test_a_wrong_field_of_a_batch_is_named(front, field, value):
    body = {"input_file_id": "file-" + "0" * 32, "endpoint": ENDPOINT, "completion_window": "24h"}
    reply = front.gateway.ask("POST", "/v1/batches", body | {field: value})
    assert reply.status == 400
    assert reply.error["param"].startswith(field)


def test_a_record_of_an_earlier_version_is_shown_whatever_its_metadata_holds(front):
    made = create(front.openai, line("a"))
    key = front.queue.keys.batch(made.id)
    front.queue.connection.hset(key, "metadata", json.dumps({"a": "\ud800"}))
    for path in ("/v1/batches", f"/v1/batches/{made.id}"):
        reply = front.gateway.get(path)
        assert (reply.status, "\\ud800" in reply.text) == (200, True)


def test_an_unknown_file_or_batch_is_unknown(front):
    with pytest.raises(NotFoundError):
        front.openai.batches.create(
            input_file_id="file-" + "0" * 32, endpoint=ENDPOINT, completion_window="24h"
        )
    for name in ("batch_" + "0" * 32, "batch_1"):
        with pytest.raises(NotFoundError):
            front.openai.batches.retrieve(name)
        with pytest.raises(NotFoundError):
            front.openai.batches.cancel(name)


def test_batches_are_listed_in_pages_newest_first(front):
    file_id = upload(front.openai, line("a"))
    ids = [
        front.openai.batches.create(
            input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h"
        ).id
        for _ in range(5)
    ]
    pages = list(front.openai.batches.list(limit=2).iter_pages())
    assert [len(page.data) for page in pages] == [2, 2, 1]
    assert sorted(one.id for page in pages for one in page.data) == sorted(ids)


def test_a_tenant_has_a_limit_of_open_batches_and_sees_only_its_own(front, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sk-number-0000001 search\nsk-number-0000002 archive\n")
    from tests.service.batcher.conftest import front_of

    fronts = front_of(front.queue, front.folder, keys_file=keys, max_open_batches=1)
    gateway = next(fronts).gateway
    first, second = (
        OpenAI(base_url=gateway.url, api_key=f"sk-number-000000{n}", max_retries=0) for n in (1, 2)
    )
    with first, second:
        made = create(first, line("a"))
        with pytest.raises(APIStatusError) as refused:
            create(first, line("a"))
        assert (refused.value.status_code, refused.value.code) == (429, "too_many_batches")
        create(second, line("a"))
        with pytest.raises(NotFoundError):
            second.batches.retrieve(made.id)
        with pytest.raises(NotFoundError):
            second.batches.create(
                input_file_id=made.input_file_id, endpoint=ENDPOINT, completion_window="24h"
            )
        assert [one.id for one in first.batches.list()] == [made.id]
    fronts.close()


def test_what_has_expired_is_deleted(front, worker, monkeypatch):
    monkeypatch.setattr("service.batcher.batcher.SWEEP_SECONDS", 0.05)
    made = create(front.openai, line("a"))
    records = Ledger(front.queue.connection, front.queue.name)
    with batcher_of(front.queue, front.folder):
        batch = ended(front.openai, made.id)
        due = {f"file:{batch.output_file_id}": 1, f"batch:{made.id}": 1}
        front.queue.connection.zadd(records.keys.batch_ends, due)
        eventually(lambda: not records.run(ledger.due_ends(records.keys, count=9)), "all deleted")
        eventually(
            lambda: not (front.folder / "files" / batch.output_file_id).exists(), "content too"
        )
    with pytest.raises(NotFoundError):
        front.openai.batches.retrieve(made.id)
    assert [one.id for one in front.openai.files.list()] == [made.input_file_id]
