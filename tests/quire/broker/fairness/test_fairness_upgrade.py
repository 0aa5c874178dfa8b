"""Fairness in a queue whose producers and workers are of two versions: the older ones know none."""

import pytest

from quire.transitions.fairness import Fairness
from quire.transitions.values import QueueLimits
from tests.quire.builders import Snapshot, claim_next, make_item, make_request
from tests.quire.older import OlderVersion


def sized(name, tenant):
    return make_request(id=name, tenant=tenant, body={"prompt": [1, 2, 3], "max_tokens": 97})


@pytest.fixture
def older(connection, broker):
    broker.set_fairness(Fairness(by_tokens=True))
    broker.set_limits(QueueLimits(rate=1000))
    return OlderVersion(connection, broker)


def finish(broker, claimed):
    (reply,) = broker.commit([make_item(claimed.claim, 0, 1, final=True)])
    assert reply.status == "ok"


def names(broker, count):
    return [claim_next(broker).claim.request_id for _ in range(count)]


def test_what_an_older_producer_submits_is_ranked_by_arrival_and_comes_to_its_end(broker, older):
    broker.submit_many([sized(f"a{n}", "a") for n in range(5)])
    older.submit(sized("old", "b"))
    broker.submit_many([sized(f"c{n}", "c") for n in range(3)])
    found = []
    for _ in range(9):
        claimed = claim_next(broker)
        found.append(claimed.claim.request_id)
        finish(broker, claimed)
        broker.balance()
    assert sorted(found) == sorted([*(f"a{n}" for n in range(5)), "old", "c0", "c1", "c2"])
    # Those of the newer producer take turns all the same.
    assert found.index("c0") < found.index("a2")


def test_an_older_worker_runs_and_returns_what_has_a_moment(broker, older, connection):
    broker.submit_many([sized(f"a{n}", "a") for n in range(2)])
    deliveries = older.read("old", count=2)
    first, second = (older.claim(delivery, owner=f"{n}") for n, delivery in enumerate(deliveries))
    assert first[0] == second[0] == b"claimed"
    assert older.release("a0", epoch=int(first[1]), owner="0") == [1]
    broker.balance()
    broker.restore(is_at_once=True)
    claimed = claim_next(broker)
    assert claimed.claim.request_id == "a0"
    finish(broker, claimed)
    assert connection.hmget(broker.keys.request("a0"), "fair", "rate") == [None, None]
    # The other one is ranked still, and the next worker that looks removes it.
    broker.claim(broker.peek(count=9))


def test_the_virtual_time_goes_on_after_an_older_worker_has_claimed(broker, older):
    """Its claims do not move the virtual time. The next claim of a newer worker does."""
    broker.submit_many([sized(f"a{n}", "a") for n in range(6)])
    for delivery in older.read("old", count=3):
        older.claim(delivery)
    for candidate in broker.peek(count=3):
        broker.claim([candidate])
    assert names(broker, 1) == ["a3"]
    broker.submit_many([sized(f"b{n}", "b") for n in range(2)])
    assert names(broker, 4) == ["b0", "a4", "b1", "a5"]


def test_a_server_that_forgets_its_last_seconds_forgets_turns_and_requests_together(
    broker, connection
):
    broker.set_fairness(Fairness(by_tokens=True))
    broker.set_limits(QueueLimits(rate=100_000))
    broker.submit_many([sized(f"a{n}", "a") for n in range(8)])
    before = Snapshot(connection, broker)
    order = [candidate.request_id for candidate in broker.peek(count=9)]
    for _ in range(4):
        finish(broker, claim_next(broker))
    broker.submit_many([sized(f"b{n}", "b") for n in range(3)])
    before.restore()
    assert [candidate.request_id for candidate in broker.peek(count=9)] == order
    broker.submit_many([sized(f"b{n}", "b") for n in range(3)])
    # Nothing was claimed in this past, so the tenant that returns begins beside the first one.
    assert names(broker, 6) == ["a0", "b0", "a1", "b1", "a2", "b2"]
