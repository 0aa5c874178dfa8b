"""Batchers are killed and frozen in the middle of a batch; every line has exactly one result."""

import signal
import threading
from collections import Counter
from pathlib import Path

import pytest

from quire.batch import files as batch_files
from quire.queue.scripts import load_source
from service.batcher.destinations import Destinations
from service.batcher.job import MAX_FAULTS, ClaimLost, Draining, Job
from service.shared.batches import ledger
from service.shared.batches.ledger import Ledger
from service.shared.batches.records import BatchRecord
from service.shared.batches.storage import FolderStorage, Work
from tests.service.batcher.builders import (
    BatcherProcess,
    batcher_of,
    create,
    ended,
    expected_text,
    line,
    lines_in,
    lines_of_batch,
    names_of,
    results_of,
    settings_of,
    value_of,
    wanted,
)
from tests.service.builders import WorkerThread

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

NUM_LINES = 200
#: Few enough that a batch does not end in them.
NUM_MORE_STEPS = 8


def run_lines(front, gate, batch_id: str, least: int) -> None:
    """Returns when so many lines are done, while a few more are made: not all, however late."""

    def are_done() -> bool:
        return front.openai.batches.retrieve(batch_id).request_counts.completed >= least

    gate.step_until(are_done)
    gate.allow(NUM_MORE_STEPS)


def test_batchers_killed_again_and_again_leave_each_line_one_result(front, gated_worker, gate):
    made = create(front.openai, *lines_of_batch(NUM_LINES))
    for least in (1, 80):
        with BatcherProcess(front.queue, front.folder, "--max-inflight", "24") as batcher:
            run_lines(front, gate, made.id, least)
            batcher.kill()
    gate.open()
    key = front.queue.keys.batch(made.id)
    assert front.openai.batches.retrieve(made.id).status == "in_progress"
    offset = int(front.queue.connection.hget(key, "offset"))
    with batcher_of(front.queue, front.folder) as batcher:
        batch = ended(front.openai, made.id)
        written = value_of(batcher, "lines_total", outcome="completed")
    assert results_of(front.openai, batch) == wanted(NUM_LINES)
    assert batch.request_counts.completed == NUM_LINES
    assert offset > 0 and written < NUM_LINES - 70, "the last one went on where the others were"
    assert batch.usage.output_tokens == sum(n % 7 + 1 for n in range(NUM_LINES))


def test_a_frozen_batcher_finds_its_claim_lost_and_changes_nothing(front, gated_worker, gate):
    made = create(front.openai, *lines_of_batch(NUM_LINES))
    with BatcherProcess(front.queue, front.folder, "--max-inflight", "24") as frozen:
        run_lines(front, gate, made.id, 50)
        frozen.signal(signal.SIGSTOP)
        gate.open()
        with batcher_of(front.queue, front.folder):
            batch = ended(front.openai, made.id)
        frozen.signal(signal.SIGCONT)
        assert frozen.wait_for_event("batch ends")["ending"] == "lost"
        frozen.signal(signal.SIGTERM)
        assert frozen.wait() == 0
    assert front.openai.batches.retrieve(made.id) == batch
    assert results_of(front.openai, batch) == wanted(NUM_LINES)
    assert len(list(front.openai.files.list(purpose="batch_output"))) == 1


def test_sigterm_gives_the_batch_back_at_once(front, gated_worker, gate):
    made = create(front.openai, *lines_of_batch(NUM_LINES))
    flags = ("--max-inflight", "24", "--lease-seconds", "60")
    with BatcherProcess(front.queue, front.folder, *flags) as first:
        run_lines(front, gate, made.id, 50)
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
        assert first.wait_for_event("batch ends")["ending"] == "drained"
    gate.open()
    # Far below the lease of the first one.
    with batcher_of(front.queue, front.folder):
        batch = ended(front.openai, made.id)
    assert results_of(front.openai, batch) == wanted(NUM_LINES)


class Claims:
    """Claims of one batch, run by hand one after the other."""

    def __init__(self, front, sources=None) -> None:
        self.front = front
        self.records = Ledger(front.queue.connection, front.queue.name, sources=sources)
        self.storage = FolderStorage(front.folder)

    def record_of(self, batch_id: str) -> BatchRecord:
        record = self.records.run(ledger.read_batch(self.records.keys, batch_id))
        assert record is not None
        return record

    def claim(self, batch_id: str, **settings) -> Job:
        keys = self.records.keys
        self.front.queue.connection.zadd(keys.batch_work, {batch_id: 1}, xx=True)
        hold = self.records.run(ledger.claim_batch(keys, batch_id, lease_ms=60_000))
        assert hold is not None
        own = settings_of(self.front.queue, self.front.folder, **settings)
        return Job(
            hold,
            self.record_of(batch_id),
            records=self.records,
            storage=self.storage,
            destinations=Destinations(self.front.queue.connection, own),
            settings=own,
        )


def without_fence() -> dict[str, str]:
    """The scripts of a batcher as they would be without epoch and owner."""
    sources = {}
    for name in ("batches/save_batch", "batches/finish_batch"):
        source = load_source(name)
        guard = "if not holds(KEYS[1], ARGV[2], ARGV[3]) then"
        assert guard in source
        sources[name] = source.replace(guard, "if false then")
        again = "if before[1] == ARGV[2] and not OPEN[before[2] or ''] then"
        sources[name] = sources[name].replace(again, "if false then")
    return sources


def overtaken(front, monkeypatch, sources=None) -> tuple[str, str, list[str]]:
    """A claim that is overtaken just before its last transition.

    Returns the output file that callers saw first, the one afterwards, and how the claim ended.
    """
    claims = Claims(front, sources)
    made = create(front.openai, *lines_of_batch(12))
    slow, end = claims.claim(made.id), Job._end
    endings: list[str] = []

    def overtake(job: Job, *arguments):
        if job is slow:
            assert Claims(front).claim(made.id).run() == "completed"
            seen.append(front.openai.batches.retrieve(made.id).output_file_id)
        return end(job, *arguments)

    seen: list[str] = []
    monkeypatch.setattr(Job, "_end", overtake)
    try:
        endings.append(slow.run())
    except ClaimLost:
        endings.append("lost")
    return seen[0], front.openai.batches.retrieve(made.id).output_file_id, endings


def test_a_claim_that_is_overtaken_before_its_end_publishes_nothing(front, worker, monkeypatch):
    first, last, endings = overtaken(front, monkeypatch)
    assert (first, endings) == (last, ["lost"])
    published = [one.id for one in front.openai.files.list(purpose="batch_output")]
    assert published == [first]
    assert len(list(front.folder.glob("files/*"))) == 2, "the input, and one output"


def test_without_the_fence_the_lines_are_published_twice(front, worker, monkeypatch):
    first, last, endings = overtaken(front, monkeypatch, without_fence())
    assert first != last and endings == ["completed"]
    files = list(front.openai.files.list(purpose="batch_output"))
    names = names_of(*(lines_in(front.openai, one.id) for one in files))
    assert set(names.values()) == {2}


def interleaved(front) -> Counter[str]:
    """Two claims of a batch write at the same time; how often each line is in the last output."""
    claims = Claims(front)
    made = create(front.openai, *lines_of_batch(60))
    slow = claims.claim(made.id, max_inflight=8, save_seconds=0.01)
    save = Job._save_progress
    is_in_the_middle, may_go_on = threading.Event(), threading.Event()

    def saved(job: Job, files, work, now) -> None:
        save(job, files, work, now)
        if job is slow and now.completed >= 10 and not is_in_the_middle.is_set():
            is_in_the_middle.set()
            assert may_go_on.wait(60)

    endings: list[str] = []

    def run_slow() -> None:
        try:
            slow.run()
        except (ClaimLost, Draining) as error:
            endings.append(type(error).__name__)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "_save_progress", saved)
        running = threading.Thread(target=run_slow)
        running.start()
        assert is_in_the_middle.wait(60)
        next_one = claims.claim(made.id)
        may_go_on_at = next_one._save_progress

        def go_on(job: Job, files, work, now) -> None:
            may_go_on_at(files, work, now)
            may_go_on.set()
            running.join(60)

        patch.setattr(next_one, "_save_progress", lambda *given: go_on(next_one, *given))
        assert next_one.run() == "completed"
        running.join(60)
    assert endings == ["ClaimLost"]
    batch = front.openai.batches.retrieve(made.id)
    return names_of(lines_in(front.openai, batch.output_file_id))


def test_two_claims_that_write_at_once_write_to_different_files(front, worker):
    names = interleaved(front)
    assert len(names) == 60 and set(names.values()) == {1}


def test_in_one_folder_for_all_claims_lines_would_be_written_twice(front, worker, monkeypatch):
    def begin(self, storage, batch_id, *, epoch, work_epoch) -> None:
        self._storage, self._epoch = storage, epoch
        self._epochs = storage.work_folder(batch_id)
        self.folder = self._epochs / "all"
        self.is_resumed = self.folder.is_dir()
        self.folder.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(Work, "__init__", begin)
    # A lock of the file system would keep the second claim out of the same machine's file.
    monkeypatch.setattr(batch_files.fcntl, "flock", lambda *_: None)
    assert max(interleaved(front).values()) == 2


@pytest.fixture
def half_done(front, worker) -> tuple[Claims, str, Path]:
    """A batch of 30 lines whose claim was given back after ten results, and the file of these."""
    claims = Claims(front)
    made = create(front.openai, *lines_of_batch(30))
    first = claims.claim(made.id, max_inflight=4, save_seconds=0.01)
    stop_after(first, 10)
    with pytest.raises(Draining):
        first.run()
    record = claims.record_of(made.id)
    assert record.offset > 0
    folder = front.folder / "work" / made.id / str(record.work_epoch)
    return claims, made.id, folder / "output.jsonl"


def assert_completed(claims: Claims, batch_id: str) -> None:
    """The next claim ends the batch, and each line has its result once."""
    assert claims.claim(batch_id).run() == "completed"
    openai = claims.front.openai
    assert results_of(openai, openai.batches.retrieve(batch_id)) == wanted(30)


@pytest.mark.parametrize("torn", ["", '{"id": "batch_req_torn", "custom_id": "row-2'])
def test_a_torn_line_is_cut_off_and_its_line_runs_again(half_done, torn):
    claims, batch_id, output = half_done
    # What a machine that crashes may leave after the last line that was saved.
    with output.open("a") as file:
        file.write(torn)
    assert_completed(claims, batch_id)


def test_without_the_work_of_the_earlier_claim_a_batch_begins_again(half_done):
    claims, batch_id, _ = half_done
    claims.storage.remove_work(batch_id)
    assert_completed(claims, batch_id)


def test_an_offset_ahead_of_the_results_is_noticed_and_mended(half_done):
    claims, batch_id, output = half_done
    output.write_text("".join(output.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(ClaimLost):
        claims.claim(batch_id).run()
    assert_completed(claims, batch_id)


@pytest.mark.parametrize("code", ["internal_error", "model_not_found"])
def test_a_batch_that_fails_after_lines_have_run_has_a_result_for_each(
    front, half_done, tmp_path, code
):
    (claims, batch_id, _), settings = half_done, {}
    if code == "internal_error":
        for _ in range(MAX_FAULTS):
            claims.claim(batch_id).note_fault()
    else:
        settings["models_file"] = tmp_path / "models.toml"
        settings["models_file"].write_text('[models.a]\nqueue = "a"\n[models.b]\nqueue = "b"\n')
    assert claims.claim(batch_id, **settings).run() == "failed"
    batch = front.openai.batches.retrieve(batch_id)
    results = results_of(front.openai, batch)
    texts = {name: text for name, text in results.items() if text != code}
    assert {*results} == {*wanted(30)} and texts.items() <= wanted(30).items()
    assert 10 <= len(texts) < 30
    counts = batch.request_counts
    assert (counts.completed, counts.failed) == (len(texts), 30 - len(texts))
    assert batch.usage.output_tokens == sum(int(name[4:]) % 7 + 1 for name in texts)
    assert [error.code for error in batch.errors.data] == [code]


def test_a_batch_that_cannot_be_given_up_ends_all_the_same(front):
    claims = Claims(front)
    made = create(front.openai, *lines_of_batch(3))
    for _ in range(MAX_FAULTS + 1):
        claims.claim(made.id).note_fault()
    assert claims.claim(made.id).run() == "failed"
    assert front.openai.batches.retrieve(made.id).output_file_id is None


def stop_after(job: Job, num_lines: int) -> None:
    """Drain a job once it has saved so many results."""
    save = job._save_progress

    def saved(files, work, now) -> None:
        save(files, work, now)
        if now.completed >= num_lines:
            job.drain()

    job._save_progress = saved  # type: ignore[method-assign]


@pytest.fixture
def may_hurry(queue):
    """Set when a worker may go on quickly. Till then a long line is far from its end."""
    may_hurry = threading.Event()
    settings = queue.settings(max_num_seqs=16)
    with WorkerThread(settings, before_run=lambda _: may_hurry.wait(0.02)):
        yield may_hurry
        may_hurry.set()


def test_the_offset_is_that_of_the_first_line_without_a_result(front, may_hurry):
    """Later lines may have results already, so they do not run again."""
    claims = Claims(front)
    lines = [line("slow", max_tokens=300), *lines_of_batch(20)]
    made = create(front.openai, *lines)
    first = claims.claim(made.id, save_seconds=0.01)
    stop_after(first, 20)
    with pytest.raises(Draining):
        first.run()
    may_hurry.set()
    record = claims.record_of(made.id)
    assert (record.offset, record.num_read, record.counts.completed) == (0, 0, 20)
    second = claims.claim(made.id)
    assert second.run() == "completed"
    assert second.num_written == (1, 0)
    texts = results_of(front.openai, front.openai.batches.retrieve(made.id))
    assert texts == wanted(20) | {"slow": expected_text(300)}
