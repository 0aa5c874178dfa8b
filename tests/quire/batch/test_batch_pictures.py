"""Lines of batches with pictures: they are stored like those of calls, and bounded in memory."""

import json
import threading
from functools import partial

import pytest

from quire.batch import open_lines
from quire.batch import run as running
from quire.batch.answers import LineAnswer
from quire.batch.batch import run_batch
from quire.batch.files import LineReader
from quire.batch.lines import BadLine, BatchLine, parse_line
from quire.batch.open_lines import OpenLines
from quire.errors import QueueFull, UnknownRequest
from quire.testing import FakeQuire
from tests.quire.picture_files import data_url, png, png_header, sha256

CHATS = "/v1/chat/completions"
RED, BLUE = png(color=b"\xff\0\0"), png(color=b"\0\0\xff")


def line(name: str, url: str) -> str:
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": parts}]}
    return json.dumps({"custom_id": name, "url": CHATS, "body": body})


def waiting_for(release):
    def answer(request):
        yield "be"
        release.wait(20)
        yield "gun"

    return answer


def test_a_picture_of_a_line_is_stored_once_for_all_lines(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(line(str(n), data_url(RED)) + "\n" for n in range(3)))
    with FakeQuire(lambda request: "red") as fake:
        progress = run_batch(fake.broker, source, tmp_path / "out.jsonl")
        assert (progress.completed, progress.failed) == (3, 0)
        assert [key.decode() for key in fake.connection.keys("*:p:*")] == [
            fake.broker.keys.picture(sha256(RED))
        ]
        (part,) = fake.requests[0].body["messages"][0]["content"]
        assert part == {"type": "image", "sha256": sha256(RED)}


def test_a_line_with_a_hostile_picture_fails_alone_by_its_field():
    good = parse_line(line("a", data_url(RED)), number=1, batch="b")
    bad = parse_line(line("b", data_url(png_header(50_000, 50_000))), number=2, batch="b")
    assert isinstance(good, BatchLine) and isinstance(bad, BadLine)
    assert bad.code == "invalid_request"
    assert "body.messages.0.content.0.image_url.url" in bad.message


def test_a_run_holds_no_more_text_than_fits_its_memory(tmp_path, monkeypatch):
    source, most = tmp_path / "in.jsonl", 0
    body = {"messages": [{"role": "user", "content": "a" * 1000}]}
    lines = [json.dumps({"custom_id": str(n), "url": CHATS, "body": body}) + "\n" for n in range(6)]
    source.write_text("".join(lines))
    monkeypatch.setattr(open_lines, "MAX_OPEN_BYTES", len(lines[0]) + 1)

    def note(progress):
        nonlocal most
        most = max(most, progress.inflight)

    with FakeQuire(lambda request: "red") as fake:
        progress = run_batch(fake.broker, source, tmp_path / "out.jsonl", on_progress=note)
    assert progress.completed == 6
    assert most <= 2


def test_pictures_are_in_memory_only_until_their_requests_are_queued(tmp_path, monkeypatch):
    source, parts = tmp_path / "in.jsonl", []
    lines = [line(str(n), data_url(RED)) + "\n" for n in range(7)]
    source.write_text("".join(lines))
    monkeypatch.setattr(open_lines, "SUBMIT_BYTES", len(lines[0]) + 1)
    monkeypatch.setattr(open_lines, "MAX_OPEN_BYTES", 7 * (len(lines[0]) - len(data_url(RED))) + 1)
    with FakeQuire(answer=waiting_for(release := threading.Event())) as fake:
        submit_messages = fake.broker.submit_messages

        def submit(messages):
            parts.append(len(messages))
            if sum(parts) == 7:
                release.set()
            return submit_messages(messages)

        monkeypatch.setattr(fake.broker, "submit_messages", submit)
        assert run_batch(fake.broker, source, tmp_path / "out.jsonl").completed == 7
    # Two lines are the first that take more than one and a byte. All seven were open at the end.
    assert parts == [1] * 7


@pytest.mark.parametrize("has_changed", [False, True])
def test_a_line_that_redis_has_lost_is_read_again_with_its_picture(
    tmp_path, monkeypatch, has_changed
):
    monkeypatch.setattr(running, "SILENT_SECONDS", 0.05)
    source, out, errors = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "errors.jsonl"))
    source.write_text("\ufeff" + line("a", data_url(RED)))
    release = threading.Event()
    with FakeQuire(answer=waiting_for(release)) as fake:
        run = partial(run_batch, fake.broker, source, out, errors_path=errors)
        runner = threading.Thread(target=run)
        runner.start()
        while not fake.requests:
            release.wait(0.001)
        if has_changed:
            source.write_text(line("a", data_url(BLUE)))
        picture = fake.broker.keys.picture(sha256(RED))
        fake.connection.delete(picture, *fake.broker.keys.of_request(fake.requests[0].id))
        release.set()
        runner.join(20)
        assert fake.connection.exists(picture) == (not has_changed)
    results = [json.loads(text) for text in out.read_text().splitlines()]
    failures = [json.loads(text) for text in errors.read_text().splitlines()]
    assert [one["custom_id"] for one in results] == ["a"] * (not has_changed)
    assert [one["error"]["code"] for one in failures] == ["lost"] * has_changed


def test_a_line_counts_with_its_pictures_as_often_as_it_has_them(tmp_path, monkeypatch):
    source = tmp_path / "in.jsonl"
    source.write_text(line("a", data_url(RED)))
    monkeypatch.setattr(open_lines, "MAX_OPEN_BYTES", source.stat().st_size)
    unfinished = OpenLines(reader := LineReader(source, "b"), model=None)
    answer = LineAnswer(unfinished.add(next(reader)))
    for _ in range(3):
        assert unfinished.complete(answer)
        assert not unfinished.has_room(0)
        unfinished.forget_pictures(answer)
        assert unfinished.has_room(0)


def test_lost_lines_that_a_full_queue_refuses_leave_no_pictures_in_memory(tmp_path, monkeypatch):
    source, num_lines = tmp_path / "in.jsonl", 4
    lines = [line(str(n), data_url(RED)) + "\n" for n in range(num_lines)]
    source.write_text("".join(lines))
    monkeypatch.setattr(open_lines, "SUBMIT_BYTES", len(lines[0]) + 1)
    monkeypatch.setattr(running, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(running, "FULL_PAUSE_SECONDS", 0.0)
    answers, queued, lost, held = [], [], set(), []
    complete = OpenLines.complete

    def note(self, answer):
        answers.append(answer)
        return complete(self, answer)

    monkeypatch.setattr(OpenLines, "complete", note)
    with FakeQuire(answer=waiting_for(release := threading.Event())) as fake:
        submit_messages, status = fake.broker.submit_messages, fake.broker.status

        def submit(messages):
            if lost and len(held) < 2 * num_lines:
                in_memory = {one.line.digest for one in answers if not one.line.lacks_pictures}
                held.append(len(in_memory))
                raise QueueFull("full")
            if lost:
                release.set()
            queued.extend(messages)
            return submit_messages(messages)

        def lose_once(request_id):
            if len(queued) >= num_lines and request_id not in lost:
                lost.add(request_id)
                raise UnknownRequest(request_id)
            return status(request_id)

        monkeypatch.setattr(fake.broker, "submit_messages", submit)
        monkeypatch.setattr(fake.broker, "status", lose_once)
        assert run_batch(fake.broker, source, tmp_path / "out.jsonl").completed == num_lines
    assert len(lost) == num_lines
    assert held == [1] * 2 * num_lines
