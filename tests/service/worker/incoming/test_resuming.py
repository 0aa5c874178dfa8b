"""What intake makes of requests that another worker has begun: they go on at the next token."""

from typing import Any

import msgpack
from structlog.testing import capture_logs

from tests.service.builders import (
    Queue,
    StepGate,
    WorkerThread,
    eventually,
    expected_tokens,
    left_in_the_middle,
    text_of,
)


def interrupted(queue: Queue, *, tokens: int, **request: Any) -> str:
    """A request some tokens of which are published by a worker that then released it."""
    request_id = queue.submit((5, 6, 7), **request)
    left_in_the_middle(queue, request_id, tokens=tokens)
    return request_id


def test_a_resumed_text_goes_on_in_the_middle_of_a_character(queue: Queue):
    # Random bytes: most of them leave a character open.
    request_id = interrupted(queue, tokens=9, max_tokens=200)
    with WorkerThread(queue.settings()):
        output = queue.result(request_id)
    assert output.token_ids == expected_tokens((5, 6, 7), max_tokens=200)
    assert output.text == text_of(output.token_ids)


def test_a_stop_string_begun_before_the_interruption_still_stops(queue: Queue):
    tokens = expected_tokens((5, 6, 7), max_tokens=200)
    whole = text_of(tokens)
    # Held back for long: the stop string is half of the whole text.
    stop = whole[10:100]
    request_id = interrupted(queue, tokens=30, max_tokens=200, stop=[stop])
    assert queue.broker.read_output({request_id: 0})[request_id].chunks
    with WorkerThread(queue.settings()):
        output = queue.result(request_id)
    assert output.completion.finish_reason == "stop"
    assert output.text == whole[: whole.index(stop)]


def test_resuming_under_another_fingerprint_goes_on_and_is_recorded(queue: Queue):
    names = [interrupted(queue, tokens=4, max_tokens=100) for _ in range(2)]
    with capture_logs() as said, WorkerThread(queue.settings(), fingerprint="fake-2") as worker:
        output, _ = map(queue.result, names)
        changed = {"model": "fake", "fingerprint": "changed"}
        assert worker.metric("quire_requests_resumed_total", **changed) == 2
    assert output.completion.resumed_fingerprint_changed
    assert output.token_ids == expected_tokens((5, 6, 7), max_tokens=100)
    first, second = (line for line in said if line["event"] == "request resumed")
    assert (first["fingerprint_changed"], first["other_fingerprint"]) == (True, "fake-1")
    # It is long, so a log has it once.
    assert second["fingerprint_changed"] is True and "other_fingerprint" not in second


def test_a_request_whose_last_token_was_published_without_its_end_gets_the_end(queue: Queue):
    """The crash fell between the last token and the terminal record: nothing may be generated."""
    request_id = interrupted(queue, tokens=6, max_tokens=100)
    body = queue.connection.get(queue.keys.body(request_id))
    assert isinstance(body, bytes)
    request = msgpack.unpackb(body)
    request["body"]["max_tokens"] = published = queue.published(request_id)
    queue.connection.set(queue.keys.body(request_id), msgpack.packb(request), keepttl=True)
    gate = StepGate(steps=0)
    with WorkerThread(queue.settings(), before_run=gate):
        output = queue.result(request_id)
    assert gate.batches == []
    assert output.completion.finish_reason == "length"
    assert output.token_ids == expected_tokens((5, 6, 7), max_tokens=published)


def test_a_request_whose_log_has_a_gap_is_buried_and_not_made_up(queue: Queue):
    request_id = interrupted(queue, tokens=12, max_tokens=30)
    log = queue.keys.output(request_id)
    entries = queue.connection.xrange(log)
    assert len(entries) > 2
    queue.connection.xdel(log, entries[1][0])
    with WorkerThread(queue.settings()) as worker:
        queue.wait_for_state(request_id, "failed")
        reason = {"queue": queue.name, "reason": "broken_log"}
        eventually(lambda: worker.metric("quire_messages_dead_lettered_total", **reason) == 1)
    news = queue.broker.read_output({request_id: 0})[request_id]
    assert news.completion is not None
    assert news.completion.error is not None
    assert news.completion.error.code == "broken_log"
