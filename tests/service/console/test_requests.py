"""How a console reads one request: long logs, large and damaged bodies, and what is lost."""

from itertools import pairwise

import pytest

from quire.errors import UnknownRequest
from quire.queue.control.defaults import QueueDefaults
from quire.queue.publish.commit import CommitItem
from service.console.reading import request as reading
from service.console.reading.lists import running
from service.console.reading.request import life_of, piece_after
from service.console.reading.timeline import events_of, spans_of
from tests.console import stage
from tests.quire.builders import claim_next, make_request
from tests.quire.picture_files import png, sha256


def begin(broker, name: str = "a", **changes):
    broker.submit(make_request(id=name, **changes))
    return claim_next(broker).claim


def grow(broker, claim, count: int, *, start: int = 0) -> None:
    for index in range(start, start + count):
        broker.commit([stage.item(claim, index, [f"<{index}>"])])


def test_of_a_long_log_the_two_ends_are_shown_and_the_rest_is_told(fake, monkeypatch):
    monkeypatch.setattr(reading, "END_ENTRIES", 4)
    claim = begin(fake.broker)
    grow(fake.broker, claim, 30)
    log = life_of(fake.broker, "a").log
    assert (log.head, log.tail) == ("<0><1><2><3>", "<26><27><28><29>")
    assert (log.is_whole, log.seen, log.num_entries) == (False, 30, 30)
    assert "Not shown" in [event.title for event in events_of(life_of(fake.broker, "a"))]


@pytest.mark.parametrize("count", [1, 4, 5, 8])
def test_a_log_that_fits_is_shown_once_and_whole(fake, monkeypatch, count):
    monkeypatch.setattr(reading, "END_ENTRIES", 4)
    claim = begin(fake.broker)
    grow(fake.broker, claim, count)
    log = life_of(fake.broker, "a").log
    assert log.is_whole and log.tail == ""
    assert log.head == "".join(f"<{index}>" for index in range(count))


def test_a_long_text_is_cut_at_both_ends(fake, monkeypatch):
    monkeypatch.setattr(reading, "MAX_TEXT", 10)
    claim = begin(fake.broker)
    fake.broker.commit([stage.item(claim, 0, ["abcdefghijklmnopqrstuvwxyz"])])
    log = life_of(fake.broker, "a").log
    assert (log.head, log.tail, log.is_whole) == ("abcdefghij", "qrstuvwxyz", False)


def test_a_body_that_is_too_large_is_not_read(fake, monkeypatch):
    monkeypatch.setattr(reading, "MAX_BODY_BYTES", 100)
    begin(fake.broker, body={"prompt": "x" * 200}, kind="completions")
    asked = life_of(fake.broker, "a").asked
    assert asked.content == "" and "too many for this page" in asked.trouble


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", stage.HOSTILE.encode()])
def test_a_body_that_nobody_can_read_says_so(fake, data):
    begin(fake.broker)
    fake.connection.set(fake.broker.keys.body("a"), data, keepttl=True)
    assert life_of(fake.broker, "a").asked.trouble


def test_a_chat_is_shown_by_its_roles(fake):
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": ["?"]}]
    fake.broker.submit(make_request(id="a", kind="chat.completions", body={"messages": messages}))
    assert life_of(fake.broker, "a").asked.content == "system:\nbe kind\n\nuser:\n['?']"


def test_a_picture_of_a_chat_is_shown_by_its_digest(fake):
    parts = [{"type": "text", "text": "What?"}, {"type": "image", "image": png()}]
    fake.client().submit(messages=[{"role": "user", "content": parts}], request_id="a")
    content = life_of(fake.broker, "a").asked.content
    assert content.startswith("user:\n") and "What?" in content
    assert content.endswith(f"[picture {sha256(png())}]")


def test_entries_that_are_not_ours_are_left_out(fake):
    claim = begin(fake.broker)
    grow(fake.broker, claim, 2)
    fake.connection.xadd(fake.broker.keys.output("a"), {"ids": b"\xc1"}, id="5-9")
    fake.connection.xadd(fake.broker.keys.output("a"), {"done": b"\xc1"}, id="6-9")
    life = life_of(fake.broker, "a")
    assert life.log.head == "<0><1>" and life.log.completion is None
    assert running(fake.broker, offset=0).rows[0].tail == "<0><1>"


def test_the_list_of_running_requests_says_since_when_each_runs(fake):
    begin(fake.broker)
    (row,) = running(fake.broker, offset=0).rows
    assert row.since_ms is not None and row.since_ms <= row.at_ms


def test_the_spans_of_a_life_have_no_gap(fake):
    claim = begin(fake.broker)
    grow(fake.broker, claim, 2)
    fake.broker.release([claim])
    again = claim_next(fake.broker).claim
    grow(fake.broker, again, 2, start=2)
    fake.broker.commit([CommitItem(again, 4, (), "", completion=stage.completed("a"))])
    record = fake.broker.keys.request("a")
    fake.connection.hincrby(record, "submitted_ms", -9000)
    fake.connection.hincrby(record, "claimed_ms", -5000)
    fake.connection.hincrby(record, "finished_ms", 3000)
    life = life_of(fake.broker, "a")
    spans = spans_of(life)
    assert len(spans) >= 3
    for before, after in pairwise(spans):
        assert before.ended_ms == after.began_ms
    assert (spans[0].kind, spans[0].began_ms) == ("waiting", life.status.submitted_ms)
    assert spans[-1].ended_ms == life.finished_ms
    assert [stint.epoch for stint in life.log.stints] == [1, again.epoch]


def test_a_request_that_waits_has_one_span_and_one_that_is_gone_none(fake):
    fake.broker.submit(make_request(id="a"))
    fake.connection.hincrby(fake.broker.keys.request("a"), "submitted_ms", -5000)
    (span,) = spans_of(life_of(fake.broker, "a"))
    assert span.kind == "waiting" and span.ended_ms - span.began_ms >= 5000
    with pytest.raises(UnknownRequest):
        life_of(fake.broker, "nobody")
    with pytest.raises(UnknownRequest):
        piece_after(fake.broker, "nobody", 0)


def test_a_running_request_whose_record_is_gone_is_in_the_list(fake):
    begin(fake.broker)
    fake.connection.delete(fake.broker.keys.request("a"))
    fake.connection.zadd(fake.broker.keys.lease, {b"\xff" + stage.HOSTILE.encode(): 9e15})
    page = running(fake.broker, offset=0)
    assert [row.status for row in page.rows] == [None, None]


def test_more_running_requests_than_a_page_sorts_are_told(fake, monkeypatch):
    monkeypatch.setattr("service.console.reading.lists.MAX_RUNNING", 2)
    for name in "abc":
        begin(fake.broker, name)
    page = running(fake.broker, offset=0)
    assert (len(page.rows), page.total, page.num_left_out) == (2, 2, 1)


def test_a_life_names_the_longest_output_only_if_there_is_one(fake):
    fake.broker.submit(make_request(id="named", body={"prompt": [1], "max_tokens": 7}))
    fake.broker.submit(make_request(id="open"))
    fake.broker.set_defaults(QueueDefaults(max_tokens=40))
    fake.broker.submit(make_request(id="bounded"))
    found = [life_of(fake.broker, name).max_tokens for name in ("named", "open", "bounded")]
    # What the open one counts for is an estimate, and no limit.
    assert found == [7, None, 40]


def test_a_page_names_the_worker_the_metadata_and_a_kept_prompt_of_an_ended_request(console, fake):
    fake.broker.keep_prompts(10_000)
    body = {"prompt": "Why is the sky blue?"}
    fake.broker.submit(
        make_request(id="a", kind="completions", body=body, metadata={"row": "r-17"})
    )
    (claimed,) = fake.broker.claim(fake.broker.peek(count=1), worker="gpu-7")
    end = stage.completed("a")
    fake.broker.commit([stage.item(claimed.claim, 0, ["It scatters."], end=end)])
    page = console.page("/requests/a").text
    assert "gpu-7" in page and "had it last" in page
    assert "Why is the sky blue?" in page and page.count("r-17") == 2
