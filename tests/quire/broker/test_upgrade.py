"""A queue whose producers and workers are of two versions while a fleet is upgraded.

The older ones know no rank sets. They run the scripts that they brought with them.
"""

import pytest

from quire.transitions.values import Claimed, NotClaimedReason
from quire.wire.output import State
from tests.quire.builders import claim_next, make_item, make_request
from tests.quire.older import OlderVersion


@pytest.fixture
def older(connection, broker):
    return OlderVersion(connection, broker)


def num_entries(connection, broker):
    return sum(connection.xlen(stream) for stream in broker.keys.all_ingress)


def finish(broker, claimed):
    claim = claimed.claim
    start = claimed.num_published
    assert broker.commit([make_item(claim, start, start + 1, final=True)])[0].status == "ok"


def test_a_waiting_worker_finds_what_an_older_producer_submits(broker, older, connection):
    for name in "ab":
        older.submit(make_request(id=name))
    assert broker.peek(count=9) == []
    found = broker.peek(count=9, block_seconds=5.0)
    assert [candidate.request_id for candidate in found] == ["a", "b"]
    for answer in broker.claim(found):
        finish(broker, answer)
    assert num_entries(connection, broker) == 0


def test_a_busy_worker_finds_it_with_the_tickets_that_its_claims_use_up(broker, older, connection):
    broker.submit_many([make_request(id=f"new{n}") for n in range(3)])
    older.submit(make_request(id="old"))
    broker.submit_many([make_request(id=f"later{n}") for n in range(5)])
    order = [claim_next(broker).claim.request_id for _ in range(9)]
    assert sorted(order) == sorted([*(f"new{n}" for n in range(3)), "old",
        *(f"later{n}" for n in range(5))])  # fmt: skip
    # Once the tickets before its own are used up it is ranked by its arrival.
    assert order.index("old") <= 4
    assert num_entries(connection, broker) == 0


@pytest.mark.parametrize("priority", [0, 1, 2, 3])
def test_its_deadline_and_its_class_count_before_its_record_was_read(broker, older, priority):
    soon = broker.now_ms() + 60_000
    older.submit(make_request(id="a", priority=priority, deadline_ms=soon))
    broker.balance()
    (by_ticket,) = broker.peek(count=1)
    assert by_ticket.priority == priority
    broker.restore(is_at_once=True)
    (by_record,) = broker.peek(count=1)
    assert abs(by_record.rank - by_ticket.rank) < 60_000_000


def test_an_older_worker_runs_what_a_new_producer_submits(broker, older, connection):
    broker.submit_many([make_request(id=name) for name in "ab"])
    deliveries = older.read("old", count=2)
    assert [request_id for _, _, request_id in deliveries] == ["a", "b"]
    for delivery in deliveries:
        assert older.claim(delivery)[0] == b"claimed"
    # They are ranked still, and the next worker that looks removes them.
    assert [answer.reason for answer in broker.claim(broker.peek(count=9))] == [
        NotClaimedReason.RUNNING, NotClaimedReason.RUNNING]  # fmt: skip
    assert broker.peek(count=9) == []
    assert num_entries(connection, broker) == 0


def test_of_an_old_and_a_new_worker_one_gets_the_request(broker, older, connection):
    broker.submit_many([make_request(id=name) for name in "ab"])
    (delivery,) = older.read("old", count=1)
    answers = broker.claim(broker.peek(count=2))
    assert [type(answer) for answer in answers] == [Claimed, Claimed]
    assert older.claim(delivery)[0] == b"running"
    assert num_entries(connection, broker) == 0


def test_what_an_older_worker_gives_back_is_found_before_new_requests(broker, older, connection):
    broker.submit(make_request(id="a"))
    (delivery,) = older.read("old")
    reply = older.claim(delivery, owner="ab")
    broker.claim(broker.peek(count=1))
    broker.submit(make_request(id="b"))
    assert older.release("a", epoch=int(reply[1]), owner="ab") == [1]
    assert connection.xlen(broker.keys.resumed(1)) == 1
    assert broker.balance()[1] == 1
    assert connection.xlen(broker.keys.resumed(1)) == 0
    # By its record it arrived before the other one.
    broker.restore(is_at_once=True)
    assert [candidate.request_id for candidate in broker.peek(count=9)] == ["a", "b"]
    finish(broker, claim_next(broker))
    finish(broker, claim_next(broker))
    assert num_entries(connection, broker) == 0


def test_what_an_older_worker_had_read_when_it_died_is_found(broker, older, connection):
    older.submit(make_request(id="a"))
    assert len(older.read("old")) == 1
    assert broker.peek(count=1, block_seconds=0.01) == []
    assert broker.balance(min_idle_seconds=0) == (1, 1)
    assert claim_next(broker).claim.request_id == "a"
    assert num_entries(connection, broker) == 0
    stream = broker.keys.ingress(1)
    assert connection.xpending(stream, "workers")["pending"] == 0


def test_a_submit_of_a_known_id_ranks_what_an_older_producer_submitted(broker, older):
    older.submit(make_request(id="a"))
    assert broker.submit(make_request(id="a")).created is False
    assert [candidate.request_id for candidate in broker.peek(count=1)] == ["a"]


def test_an_older_worker_that_restores_takes_nothing_from_a_new_one(broker, older, connection):
    broker.submit_many([make_request(id=name) for name in "ab"])
    for name in "ab":
        older.restore(name)
    for _ in range(2):
        finish(broker, claim_next(broker))
    assert broker.peek(count=9, block_seconds=0.01) == []
    assert num_entries(connection, broker) == 0


def test_when_the_new_workers_go_again_an_older_one_finds_all_that_waits(broker, older, connection):
    """A claim of a new worker has used up the ticket by which it would have known the other."""
    broker.submit_many([make_request(id=name) for name in "ab"])
    broker.claim([broker.peek(count=2)[1]])
    ((_, fields),) = connection.xrange(broker.keys.ingress(1))
    assert fields[b"id"] == b"b"
    (delivery,) = older.read("old")
    assert older.claim(delivery)[0] == b"running"
    assert older.restore("a") == [b"entry"]
    (delivery,) = older.read("old")
    assert older.claim(delivery)[0] == b"claimed"
    assert broker.status("a").state is State.RUNNING
    broker.claim(broker.peek(count=9))
