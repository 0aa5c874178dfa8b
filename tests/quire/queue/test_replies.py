"""What Redis holds may be damaged or foreign: that is said, and hides nothing that is not."""

import pytest

from quire.errors import ProtocolError
from quire.queue.control.limits import backlog_of, limits_of
from quire.queue.groups.grouping import counts_of, ends_in
from quire.queue.repair.dead_letters import dead_letter_of
from quire.queue.request.status import status_of
from quire.queue.view.inspection import inspect_shards
from quire.queue.workers.workers import worker_of
from tests.quire.builders import submit_and_claim


@pytest.mark.parametrize(
    "read",
    [
        lambda: status_of("r", {b"hello": b"world"}),
        lambda: status_of("r", {b"state": b"upside down", b"deadline_ms": b"0"}),
        lambda: dead_letter_of(b"1-1", {b"hello": b"world"}),
        lambda: dead_letter_of(b"1-1", {b"id": b"\xff"}),
        lambda: worker_of(b"w", b"x ready \x80", now_ms=0),
        lambda: worker_of(b"w", b"1", now_ms=0),
        lambda: limits_of({b"max_requests": b"many"}),
        lambda: limits_of({b"max_requests": b"-1"}),
        lambda: limits_of({b"max_of:\xff": b"1"}),
        lambda: backlog_of({b"tenant:a": b"few"}),
        lambda: counts_of({b"upside down": b"1"}),
        lambda: ends_in([(b"1-1", {b"hello": b"world"})]),
    ],
)
def test_what_is_not_ours_is_said_to_be_damaged(read):
    with pytest.raises(ProtocolError, match="is damaged"):
        read()


def test_a_letter_that_is_not_ours_hides_no_other_one(broker, connection):
    for name in ("a", "b"):
        connection.xadd(broker.keys.dead, {"hello": "world"})
        broker.dead_letter(submit_and_claim(broker, id=name).claim, "tired of it")
    assert [letter.request_id for letter in broker.dead_letters()] == ["b", "a"]


def test_a_worker_whose_word_cannot_be_read_hides_no_other_one(broker, connection):
    broker.beat_worker("good", "serving", {})
    connection.hset(broker.keys.workers, "bad", b"soon serving \x80")
    assert [worker.name for worker in broker.workers()] == ["good"]
    (state,) = inspect_shards(connection, [broker.keys])
    assert [worker.name for worker in state.workers] == ["good"]


def test_what_an_operator_has_written_in_another_encoding_ends_no_worker(broker, connection):
    """A terminal may write a reason at the console that is no UTF-8; a burst looks at it."""
    wishes = {"paused": b"l\xe4uft", b"drain:b\xfccher": "1"}
    connection.hset(broker.keys.control, mapping=wishes)
    assert broker.pause_reason() == "l\N{REPLACEMENT CHARACTER}uft"
    assert broker.control().drain_wishes == {"b\N{REPLACEMENT CHARACTER}cher"}
