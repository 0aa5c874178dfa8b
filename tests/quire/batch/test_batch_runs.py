"""What a run of a batch file tells of itself: it neither waits for that nor fails by it."""

import threading

import pytest
from redis.exceptions import ConnectionError as Lost
from redis.exceptions import NoPermissionError

from quire.batch import runs
from quire.batch.progress import BatchOptions, BatchProgress
from quire.batch.runs import MAX_RUNS, RunRecord, RunTeller, runs_in
from quire.errors import ProtocolError
from quire.testing.in_memory import FakeQuire
from quire.wire.codec import pack_own
from tests.quire.batch_folder import Folder, ask, waiting_for

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def told(fake) -> list[RunRecord]:
    return runs_in(fake.connection.hgetall(fake.broker.keys.runs))


def test_a_run_tells_its_progress_while_it_runs_and_its_end(folder, monkeypatch):
    monkeypatch.setattr(runs, "TELL_SECONDS", 0.0)
    release, seen = threading.Event(), []
    folder.write(ask("a"), ask("b", "slow"), "nonsense")

    def look(progress):
        if progress.completed == 1 and not release.is_set():
            seen.extend(told(fake))
            release.set()

    with FakeQuire(answer=waiting_for(release)) as fake:
        folder.run(fake.client(), on_progress=look, model="abacus", name="nightly", tenant="acme")
        (end,) = told(fake)
        assert 0 < fake.connection.pttl(fake.broker.keys.runs) <= runs.MEMORY_MS
    (while_it_ran,) = seen
    assert (while_it_ran.ending, while_it_ran.inflight, while_it_ran.completed) == ("", 1, 1)
    assert (end.name, end.tenant, end.model) == ("nightly", "acme", "abacus")
    assert (end.ending, end.total, end.completed, end.failed) == ("completed", 3, 2, 1)
    assert end.share == 1.0 and end.began_ms <= end.told_ms and end.id == while_it_ran.id


def test_between_two_words_a_run_tells_nothing_but_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "TELL_SECONDS", 3600.0)
    with FakeQuire() as fake:
        teller = RunTeller(fake.broker, tmp_path / "o", BatchOptions(name="n"), name="n")
        for number in range(3):
            teller.tell(BatchProgress(9, completed=number))
        assert [one.completed for one in told(fake)] == [0]
        teller.tell(BatchProgress(9, completed=9, ending="completed"))
        assert [(one.completed, one.ending) for one in told(fake)] == [(9, "completed")]


def test_a_name_that_is_not_utf_8_is_told_with_marks(tmp_path):
    with FakeQuire() as fake:
        options = BatchOptions(name="n", model="m\udcff")
        RunTeller(fake.broker, tmp_path / "o\udcff", options, name="a\udcff").tell(BatchProgress(9))
        assert [(one.name, one.model) for one in told(fake)] == [("a?", "m?")]


def test_a_run_that_goes_on_is_the_same_and_one_with_other_files_is_another(folder, tmp_path):
    folder.write(ask("a"))
    with FakeQuire(answer=lambda _: "ok") as fake:
        folder.run(fake.client())
        folder.run(fake.client(), resume=True)
        assert len(told(fake)) == 1
        folder.output = tmp_path / "other.jsonl"
        folder.errors = tmp_path / "other.errors.jsonl"
        folder.run(fake.client())
        assert len(told(fake)) == 2


@pytest.mark.parametrize("error", [NoPermissionError("NOPERM"), Lost("gone")])
def test_a_run_that_cannot_tell_goes_on(folder, monkeypatch, error):
    calls = []

    def refuse(*_):
        calls.append(1)
        raise error

    monkeypatch.setattr(runs, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(runs, "send", refuse)
    folder.write(ask("a"))
    with FakeQuire(answer=lambda _: "ok") as fake:
        assert folder.run(fake.client()).completed == 1
        assert told(fake) == []
    # Without the right it does not ask again.
    assert (len(calls) == 1) == isinstance(error, NoPermissionError)


def test_a_new_run_removes_those_that_are_old_too_many_or_unreadable(folder, monkeypatch):
    folder.write(ask("a"))
    with FakeQuire(answer=lambda _: "ok") as fake:
        now_ms = fake.broker.now_ms()
        key = fake.broker.keys.runs
        folder.run(fake.client())
        (one,) = told(fake)
        fields = {name: getattr(one, name) for name in RunRecord.__slots__ if name != "id"}
        fake.connection.hset(key, "old", pack_own(fields | {"told_ms": now_ms - 90_000_000}))
        fake.connection.hset(key, "junk", b"\xc1")
        folder.run(fake.client(), name="second", resume=True)
        assert fake.connection.hlen(key) == 2
        for number in range(MAX_RUNS + 5):
            word = fields | {"told_ms": now_ms - number}
            fake.connection.hset(key, f"r{number}", pack_own(word))
        folder.run(fake.client(), name="next", resume=True)
        kept = {one.id for one in told(fake)}
        assert len(kept) == fake.connection.hlen(key) == MAX_RUNS
        assert f"r{MAX_RUNS + 4}" not in kept and "r0" in kept


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", pack_own({"name": "x", "total": "many"})])
def test_a_word_that_cannot_be_read_is_a_typed_error(data):
    with pytest.raises(ProtocolError):
        RunRecord.of(b"x", data)


def test_what_a_run_tells_is_bounded(tmp_path):
    with FakeQuire() as fake:
        options = BatchOptions(name="n", model="m" * 9999)
        RunTeller(fake.broker, tmp_path / "o", options, name="x" * 9999).tell(BatchProgress(1))
        (size,) = map(len, fake.connection.hvals(fake.broker.keys.runs))
        assert size < 1000
