"""The files of a batch: what a run that ends in the middle leaves, and what is made of it."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from quire import RequestFailed
from quire.batch.files import BatchFileError, ResultFiles, lines_of
from quire.testing.in_memory import FakeQuire
from tests.quire.batch_folder import Folder, ask

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def take_up(folder):
    """A resume, as far as it goes without a queue."""
    lines = lines_of(folder.input, "in")
    ResultFiles(folder.output, folder.errors, resume=True, lines=lines).close()


def broken_off(folder):
    """A batch of which one line had failed and one was broken off; returns the failures."""
    folder.write("nonsense", ask("late"))
    with FakeQuire() as fake:
        folder.run(fake.client(), deadline_seconds=1e-9)
    assert folder.codes == {None: "invalid_json", "late": "batch_expired"}
    return folder.failures


_TAKE_UP = """
import os, sys
from pathlib import Path
from quire.batch.files import ResultFiles, lines_of
owner, name, source, output, errors = sys.argv[1:]
setattr({"os": os, "Path": Path}[owner], name, lambda *_: os._exit(9))
ResultFiles(Path(output), Path(errors), resume=True, lines=lines_of(Path(source), "in"))
"""


@pytest.mark.processes
@pytest.mark.parametrize("step", ["os write", "os fsync", "Path replace"])
def test_a_run_killed_while_it_writes_the_errors_anew_has_lost_none(folder, step):
    before = broken_off(folder)
    files = map(str, (folder.input, folder.output, folder.errors))
    killed = subprocess.run([sys.executable, "-c", _TAKE_UP, *step.split(), *files], cwd=ROOT)
    assert killed.returncode == 9
    assert folder.failures == before
    take_up(folder)
    assert folder.codes == {None: "invalid_json"}
    assert sorted(path.name for path in folder.errors.parent.iterdir()) == [
        "errors.jsonl", "in.jsonl", "out.jsonl"
    ]  # fmt: skip


def test_a_disk_too_full_for_the_errors_anew_keeps_the_old_ones(folder, monkeypatch):
    before = broken_off(folder)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("os.write", full)
        with pytest.raises(OSError, match="No space left"):
            take_up(folder)
    assert folder.failures == before
    assert not list(folder.errors.parent.glob("*.new"))
    take_up(folder)
    assert folder.codes == {None: "invalid_json"}


def test_the_errors_written_anew_are_still_one_batch_s_alone(folder):
    broken_off(folder)
    lines = lines_of(folder.input, "in")
    with ResultFiles(folder.output, folder.errors, resume=True, lines=lines):
        another = folder.output.with_name("another.jsonl")
        with pytest.raises(BatchFileError, match=f"{folder.errors}: another batch is writing it"):
            ResultFiles(another, folder.errors, resume=True)


def test_whoever_opened_the_errors_before_they_were_written_anew_does_not_write_them(
    folder, monkeypatch
):
    broken_off(folder)
    locked, opened = fcntl.flock, []

    def after_another_run(descriptor, how):
        opened.append(descriptor)
        if len(opened) == 2:
            folder.errors.with_name("new").write_text("")
            folder.errors.with_name("new").replace(folder.errors)
        locked(descriptor, how)

    monkeypatch.setattr("fcntl.flock", after_another_run)
    with pytest.raises(BatchFileError, match=f"{folder.errors}: another batch is writing it"):
        take_up(folder)
    assert folder.errors.read_text() == ""


def test_errors_named_by_a_link_are_written_anew_where_they_are(folder, tmp_path):
    broken_off(folder)
    kept = tmp_path / "elsewhere"
    folder.errors.rename(kept)
    kept.chmod(0o640)
    folder.errors.symlink_to(kept)
    take_up(folder)
    assert folder.errors.is_symlink()
    assert kept.stat().st_mode & 0o777 == 0o640
    assert folder.codes == {None: "invalid_json"}


def test_a_line_that_was_mended_between_two_runs_has_one_result(folder):
    def answer(request):
        if request.body["prompt"] == "bad":
            raise RequestFailed("no_paper", "the tray is empty")
        return "good"

    folder.write(ask("a", top_p=7), ask("b", "bad"), ask("c", "bad"), "nonsense", ask("d"))
    with FakeQuire(answer=answer) as fake:
        folder.run(fake.client())
        assert folder.codes == {
            "a": "invalid_request", "b": "no_paper", "c": "no_paper", None: "invalid_json"
        }  # fmt: skip
        folder.write(ask("a", top_p=0.7), ask("b"), ask("c", "bad"), "nonsense", ask("d"))
        progress = folder.run(fake.client(), resume=True)
        assert folder.texts == dict.fromkeys("abd", "good")
        assert folder.codes == {"c": "no_paper", None: "invalid_json"}
        assert (progress.completed, progress.failed) == (3, 2)
        assert [request.body["prompt"] for request in fake.requests].count("bad") == 2


@pytest.mark.parametrize("which", ["output", "errors"])
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_results_are_not_written_where_they_do_not_stay(folder, which, kind):
    folder.write(ask("a"))
    path = getattr(folder, which)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.relpath(path))
    with FakeQuire() as fake, pytest.raises(BatchFileError, match="results need a regular file"):
        folder.run(fake.client())


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_an_output_without_a_name_is_the_error_of_a_file(folder, path):
    folder.write(ask("a"))
    folder.output = Path(path)
    with FakeQuire() as fake, pytest.raises(BatchFileError, match="is a directory"):
        folder.run(fake.client())


def test_a_bad_line_is_told_again_when_something_else_is_wrong_with_it(folder):
    folder.write("nonsense", "[1]")
    with FakeQuire() as fake:
        folder.run(fake.client())
        folder.write({"custom_id": "a"}, "[1]")
        folder.run(fake.client(), resume=True)
    assert folder.codes == {None: "invalid_json", "a": "invalid_url"}
    assert [line["id"].startswith("batch_req_line_") for line in folder.failures] == [True, True]
