"""`quire run-batch` when something is wrong with its files: a sentence, and the exit code."""

import json
import os
import signal
from pathlib import Path

import pytest

from quire.errors import BrokerUnavailable
from quire.testing.in_memory import FakeWorker

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(60)]


@pytest.fixture
def source(tmp_path) -> Path:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(line) + "\n")
    return path


def test_a_file_that_is_not_there_is_named(quire, tmp_path):
    missing = str(tmp_path / "missing.jsonl")
    code, out, err = quire("run-batch", "-i", missing, "-o", str(tmp_path / "out.jsonl"))
    assert (code, out, err) == (2, "", f"error: {missing}: No such file or directory\n")
    assert not list(tmp_path.iterdir()), "nothing was run, so there are no files for results"


def test_a_pipe_is_refused_and_not_taken_for_an_empty_batch(quire, tmp_path):
    pipe, output = tmp_path / "pipe", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    code, out, err = quire("run-batch", "-i", str(pipe), "-o", str(output))
    assert (code, out) == (2, "")
    assert err == f"error: {pipe}: must be a regular file, because it is read twice\n"
    assert not output.exists()


def test_the_summary_names_the_frequent_reasons_and_the_file_of_all(
    quire, real_broker, tmp_path, monkeypatch
):
    monkeypatch.setattr("quire.cli.run_batch.LINE_SECONDS", 0.0)
    wrong = ("temperature",) * 3 + ("top_p",) * 2 + ("min_p", "max_tokens")
    bodies = [{"prompt": "x"}, *({"prompt": "x", name: -7} for name in wrong)]
    lines = [
        {"custom_id": f"{row}", "method": "POST", "url": "/v1/completions", "body": body}
        for row, body in enumerate(bodies)
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = ("-i", str(source), "-o", str(output))
    with FakeWorker(real_broker, lambda request: "done"):
        code, out, err = quire("run-batch", *paths)
    first, *reasons, file = out.splitlines()
    assert code == 3 and first.startswith("completed: 1 completed, 7 failed, ")
    assert [line.split()[0] for line in reasons] == ["3", "2", "1"]
    assert (
        "body.temperature" in reasons[0] and file == f"  each line: {tmp_path / 'out.errors.jsonl'}"
    )
    # No terminal, so each progress is a line of its own.
    assert err.count("\n") > 1 and "\x1b" not in err
    # What failed in an earlier run is in the file.
    assert quire("run-batch", *paths, "--resume")[1].splitlines()[-1] == file


def test_a_mark_before_the_first_line_is_not_a_part_of_it(quire, source, real_broker, tmp_path):
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes())
    with FakeWorker(real_broker, lambda request: "done"):
        code, _, _ = quire("run-batch", "-i", str(source), "-o", str(tmp_path / "out.jsonl"))
    assert code == 0


def test_bytes_that_are_no_text_are_not_asked_for_as_other_letters(quire, source, tmp_path):
    source.write_bytes(source.read_bytes().replace(b'"x"', b'"caf\xe9"'))
    output = tmp_path / "out.jsonl"
    assert quire("run-batch", "-i", str(source), "-o", str(output))[0] == 1
    (line,) = (tmp_path / "out.errors.jsonl").read_text().splitlines()
    told = json.loads(line)["error"]
    assert told == {"code": "invalid_json", "message": "line 1: is not UTF-8"}


def test_results_are_never_written_into_the_requests(quire, source, tmp_path):
    before = source.read_bytes()
    into = ["-o", str(tmp_path / "out.jsonl"), "-e", str(source)]
    for paths in (["-o", str(source)], into, [*into, "--resume"]):
        code, out, err = quire("run-batch", "-i", str(source), *paths)
        assert (code, out) == (2, "")
        assert err == f"error: {source}: requests and results need different files\n"
    assert source.read_bytes() == before


def test_a_priority_that_there_is_not_is_named(quire, source, tmp_path):
    paths = ["-i", str(source), "-o", str(tmp_path / "out.jsonl")]
    code, _, err = quire("run-batch", *paths, "--priority", "urgent")
    assert code == 2
    assert err == "error: priority: must be one of low, normal, high, critical\n"


def test_a_full_disk_ends_the_run_and_not_the_results(quire, source, real_broker, tmp_path):
    errors = str(tmp_path / "errors.jsonl")
    with FakeWorker(real_broker, lambda request: "done"):
        code, out, err = quire("run-batch", "-i", str(source), "-o", "/dev/full", "-e", errors)
    assert (code, out) == (1, "")
    assert err == ("error: No space left on device; written results stay, --resume continues\n")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--shards", "0"], "shards: must be at least 1"),
        (["--max-inflight", "-1"], "max_inflight: must be positive"),
        (["--tenant", "a b"], "tenant: must match ^[A-Za-z0-9._-]{1,64}$"),
        *(
            (["--deadline", seconds], "deadline_seconds: must be a positive number of seconds up ")
            for seconds in ("nan", "inf", "1e300", "-1", "0")
        ),
    ],
)
def test_numbers_and_names_that_cannot_be_are_refused_before_a_file_is_made(
    quire, source, tmp_path, wrong, told
):
    code, out, err = quire("run-batch", "-i", str(source), "-o", str(tmp_path / "o"), *wrong)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {told}")
    assert list(tmp_path.iterdir()) == [source]


def test_results_are_not_written_where_the_summary_would_be_written_over_them(
    quire, source, tmp_path, monkeypatch
):
    output = tmp_path / "out.jsonl"
    with output.open("w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        for paths in (["-o", str(output)], ["-o", str(tmp_path / "o"), "-e", str(output)]):
            code, _, err = quire("run-batch", "-i", str(source), *paths)
            assert code == 2
            reason = "the summary is written to it (stdout); name another file"
            assert err == f"error: {output}: {reason}\n"
    assert output.read_text() == ""


def test_a_second_interruption_does_not_wait_for_a_queue_that_is_away(quire, source, monkeypatch):
    output = source.with_name("out.jsonl")

    def away(run, on_progress):
        signal.raise_signal(signal.SIGINT)
        assert run._stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        raise BrokerUnavailable("Redis cannot be reached")

    monkeypatch.setattr("quire.batch.batch.BatchRun.until_it_ends", away)
    before = signal.getsignal(signal.SIGINT)
    assert quire("run-batch", "-i", str(source), "-o", str(output)) == (130, "", "")
    assert signal.getsignal(signal.SIGINT) is before


def test_beside_a_device_no_file_of_failures_is_made(quire, source):
    code, _, err = quire("run-batch", "-i", str(source), "-o", os.devnull)
    assert code == 2 and "is not a regular file" in err
    assert not Path(f"{os.devnull}.errors.jsonl").exists()
