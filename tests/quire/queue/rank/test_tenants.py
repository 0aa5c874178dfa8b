"""What is shown of the tenants of a queue."""

from quire.queue.control.limits import QueueLimits
from quire.queue.rank.fairness import Fairness
from quire.queue.view.tenants import SharingState, TenantState, sharing, tenants
from tests.quire.builders import claim_next, make_request


def submit(broker, tenant, count, **fields):
    body = {"prompt": [1, 2, 3], "max_tokens": 97}
    broker.submit_many([make_request(body=body, tenant=tenant, **fields) for _ in range(count)])


def test_a_queue_without_requests_has_no_tenants(broker):
    (state,) = broker.run(sharing([broker.keys]))
    assert state == SharingState(False, 0, 0, (0, 0, 0, 0))
    assert broker.run(tenants([broker.keys], count=9))[0] == []


def test_who_is_ahead_and_who_is_limited_is_shown(broker):
    broker.set_fairness(Fairness(by_tokens=True, weights={"b": 2}))
    broker.set_limits(QueueLimits(rate=600, rates={"b": 0, "c": 30_000}))
    submit(broker, "a", 6)
    submit(broker, "b", 4)
    submit(broker, "c", 3, priority="high")
    claim_next(broker)
    (state,) = broker.run(sharing([broker.keys]))
    # The virtual time is the start of the one request that was claimed, the first of its class.
    assert state == SharingState(True, 3, 1, (0, 600, 300, 0))
    a, b, c = broker.run(tenants([broker.keys], count=3))[0]
    assert (a.tenant, a.num_open, a.weight, a.tokens_per_minute) == ("a", 6, 1, 600)
    assert a.ahead_tokens == 600 and a.tokens_left < 10
    # It was lifted one token after the virtual time.
    assert b == TenantState("b", 4, 2, 201, None, None)
    assert (c.tenant, c.ahead_tokens, c.tokens_per_minute) == ("c", 300, 30_000)
    assert 29_700 <= c.tokens_left <= 30_000


def test_only_those_with_the_most_open_requests_are_shown(broker):
    for number in range(1, 6):
        submit(broker, f"t{number}", number)
    found = broker.run(tenants([broker.keys], count=2))[0]
    assert [(one.tenant, one.num_open) for one in found] == [("t5", 5), ("t4", 4)]


def test_a_virtual_time_that_cannot_be_read_hides_nothing_else(broker, connection):
    submit(broker, "a", 2)
    connection.hset(broker.keys.arrival, "fair:1", b"\xff nonsense")
    (state,) = broker.run(sharing([broker.keys]))
    assert state == SharingState(False, 1, 0, (0, 0, 0, 0))
    (one,) = broker.run(tenants([broker.keys], count=9))[0]
    assert (one.tenant, one.num_open, one.ahead_tokens) == ("a", 2, 0)
    # The next request of the class begins anew.
    broker.set_fairness(Fairness(by_tokens=True))
    submit(broker, "a", 1)
    assert broker.run(sharing([broker.keys]))[0].ahead_tokens == (0, 100, 0, 0)
