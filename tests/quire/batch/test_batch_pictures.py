"""Lines of batches with pictures: they are stored like those of calls, and bounded in memory."""

import json

from quire.batch import run as running
from quire.batch.batch import run_batch
from quire.batch.lines import BadLine, BatchLine, parse_line
from quire.testing import FakeQuire
from tests.quire.picture_files import data_url, png, png_header, sha256

RED = png(color=b"\xff\0\0")


def line(name: str, url: str) -> str:
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": parts}]}
    return json.dumps({"custom_id": name, "url": "/v1/chat/completions", "body": body})


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


def test_a_run_opens_no_more_lines_than_fit_its_memory(tmp_path, monkeypatch):
    source, most = tmp_path / "in.jsonl", 0
    lines = [line(str(n), data_url(RED)) + "\n" for n in range(6)]
    source.write_text("".join(lines))
    monkeypatch.setattr(running, "MAX_OPEN_BYTES", len(lines[0]) + 1)

    def note(progress):
        nonlocal most
        most = max(most, progress.inflight)

    with FakeQuire(lambda request: "red") as fake:
        progress = run_batch(fake.broker, source, tmp_path / "out.jsonl", on_progress=note)
    assert progress.completed == 6
    assert most <= 2
