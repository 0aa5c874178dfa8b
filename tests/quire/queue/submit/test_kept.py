"""What a producer keeps with a request lives as long as the results, and nobody else sees it."""

from dataclasses import replace

import pytest

from quire.errors import InvalidRequest, UnknownRequest
from quire.queue.request.status import status
from quire.wire.message import Message
from quire.wire.output import State
from tests.quire.books import unbalanced
from tests.quire.builders import claim_next, make_item, make_request, read_all

KEPT = b"input items of a response"


@pytest.fixture
def kept(broker):
    """Submits a request that keeps something; reads what is kept of it."""
    broker.submit_messages([replace(Message.of(make_request(id="a")), kept=KEPT)])
    return lambda: broker.kept("a")


def finish(broker, claimed):
    claim, start = claimed.claim, claimed.num_published
    assert broker.commit([make_item(claim, start, start + 1, final=True)])[0].status == "ok"


def lifetimes(broker, connection):
    """The milliseconds that record and log still have, at the same moment."""
    with connection.pipeline(transaction=True) as pipeline:
        for key in (broker.keys.request("a"), broker.keys.output("a")):
            pipeline.pttl(key)
        return pipeline.execute()


def test_it_lives_as_long_as_the_results(broker, connection, kept):
    claimed = claim_next(broker)
    assert kept() == KEPT
    assert KEPT not in claimed.request_bytes
    finish(broker, claimed)
    assert kept() == KEPT
    of_record, of_log = lifetimes(broker, connection)
    assert abs(of_record - of_log) < 1000
    assert 0 < of_record <= 3_600_000


def test_it_outlives_a_cancellation_and_a_claim_that_is_lost(broker, kept, connection):
    claim_next(broker)
    connection.zadd(broker.keys.lease, {"a": 1})
    assert broker.reap() != []
    assert kept() == KEPT
    assert broker.cancel("a") is State.CANCELLED
    assert kept() == KEPT


def test_a_request_that_keeps_nothing_has_no_field_for_it(broker, connection):
    broker.submit(make_request(id="b"))
    assert not connection.hexists(broker.keys.request("b"), "kept")
    assert broker.kept("b") is None


def test_a_repeated_submit_changes_nothing_of_it(broker, kept):
    again = broker.submit_messages([replace(Message.of(make_request(id="a")), kept=b"other")])
    assert not again[0].created
    assert kept() == KEPT


def test_a_status_has_its_fields_and_does_not_read_what_is_kept(broker, kept):
    """A status is read whenever a reader waits, and what is kept may take a megabyte."""
    claimed = claim_next(broker)
    broker.commit([make_item(claimed.claim, 0, 2)])
    found = broker.status("a")
    assert (found.state, found.published, found.attempts) == (State.RUNNING, 2, 1)
    sent = str(next(status(broker.keys, "a")))
    assert "published" in sent
    assert "hgetall" not in sent
    assert "'kept'" not in sent


def test_a_discarded_request_that_runs_goes_on_without_it(broker, kept, connection):
    claimed = claim_next(broker)
    assert broker.discard("a") is State.RUNNING
    assert kept() is None
    assert unbalanced(connection, broker) == []
    finish(broker, claimed)
    assert read_all(broker, "a")[1].state is State.COMPLETED
    assert broker.discard("a") is State.COMPLETED
    assert not connection.exists(*broker.keys.of_request("a"))


def test_a_discarded_request_is_unknown_and_its_id_is_free(broker, kept):
    broker.cancel("a")
    assert broker.discard("a") is State.CANCELLED
    for ask in (broker.discard, broker.cancel, broker.status):
        with pytest.raises(UnknownRequest):
            ask("a")
    assert broker.submit(make_request(id="a")).created


def test_a_member_of_a_group_cannot_be_discarded(broker):
    broker.submit(make_request(id="g~a"))
    with pytest.raises(InvalidRequest):
        broker.discard("g~a")
