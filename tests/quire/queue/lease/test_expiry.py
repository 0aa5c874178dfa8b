"""EXPIRE: a request whose time is over while it waits is told so, though nobody claims anything."""

import pytest

from quire.queue.lease.lease import BackOff
from quire.queue.lease.moving import Expired, expire_call
from quire.wire.output import ErrorInfo, State
from tests.quire.builders import (
    claim_next,
    make_item,
    make_request,
    read_all,
    submit_and_claim,
)

#: The most a request in the queue may take in Redis besides its body.
MAX_BYTES_PER_QUEUED_REQUEST = 1200


def end_of(broker, request_id):
    _, completion = read_all(broker, request_id)
    return completion.state, completion.error.code


def test_a_deadline_that_passes_in_the_queue_is_told_without_a_claim(broker):
    broker.submit(make_request(id="a", deadline_ms=1))
    assert broker.expire() == [Expired("a", State.EXPIRED)]
    assert end_of(broker, "a") == (State.EXPIRED, "deadline_exceeded")
    assert broker.expire() == []
    assert broker.peek(count=1) == []


def test_a_request_that_waits_for_longer_than_the_queue_allows_is_told_so(broker, clockwork):
    broker.submit(make_request(id="a"))
    assert broker.expire() == []
    clockwork.expire_queue_time("a")
    assert broker.expire() == [Expired("a", State.EXPIRED)]
    assert end_of(broker, "a") == (State.EXPIRED, "queue_timeout")


def test_a_paused_queue_still_tells_who_is_late(broker):
    broker.submit(make_request(id="a", deadline_ms=1))
    broker.pause("repairs")
    assert [expired.request_id for expired in broker.expire()] == ["a"]


def test_the_deadline_of_a_scheduled_request_ends_its_schedule(broker, connection):
    later = broker.now_ms() + 60_000
    broker.submit(make_request(id="a", not_before_ms=later, deadline_ms=1))
    assert broker.expire() == [Expired("a", State.EXPIRED)]
    assert connection.zcard(broker.keys.delay) == 0
    assert broker.promote() == []


def test_the_time_of_a_scheduled_request_begins_when_it_is_due(make_broker, connection):
    broker = make_broker(max_queue_seconds=10)
    due = broker.now_ms() + 60_000
    broker.submit(make_request(id="a", not_before_ms=due))
    assert connection.zscore(broker.keys.wait, "a") == due + 10_000


@pytest.mark.parametrize("way", ["claimed", "cancelled", "forgotten"])
def test_only_what_waits_has_a_time_to_wait(broker, connection, clockwork, way):
    broker.submit(make_request(id="a"))
    assert connection.zcard(broker.keys.wait) == 1
    if way == "claimed":
        claim_next(broker)
    elif way == "cancelled":
        broker.cancel("a")
    else:
        connection.delete(*broker.keys.of_request("a"))
        clockwork.expire_queue_time("a")
        assert broker.expire() == []
    assert connection.zcard(broker.keys.wait) == 0


def test_what_comes_back_waits_anew_with_the_deadline_it_had(broker, connection, clockwork):
    deadline = broker.now_ms() + 50_000
    claimed = submit_and_claim(broker, id="a", deadline_ms=deadline)
    broker.release([claimed.claim])
    assert connection.zscore(broker.keys.wait, "a") == deadline
    broker.fail(claim_next(broker).claim, ErrorInfo("x", "y"), retry=BackOff())
    assert connection.zscore(broker.keys.wait, "a") == deadline
    clockwork.expire_delay("a")
    broker.promote()
    clockwork.expire_lease(claim_next(broker).claim.request_id)
    broker.reap()
    assert connection.zscore(broker.keys.wait, "a") == deadline


def test_a_running_request_past_its_deadline_is_left_to_its_worker(broker):
    claimed = submit_and_claim(broker, id="a", deadline_ms=broker.now_ms() + 60_000)
    broker.connection.hset(broker.keys.request("a"), "deadline_ms", "1")
    assert broker.expire() == []
    assert broker.commit([make_item(claimed.claim, 0, 1, final=True)])[0].status == "ok"


def test_a_request_claimed_between_the_look_and_the_end_goes_on(broker, clockwork, monkeypatch):
    broker.submit(make_request(id="a"))
    claims = []
    clockwork.expire_queue_time("a")

    def give_time_and_build(keys, request_ids):
        assert request_ids == ["a"], "the sweep has seen that its time is over"
        clockwork.connection.zadd(keys.wait, {"a": broker.now_ms() + 60_000})
        claims.append(claim_next(broker))
        return expire_call(keys, request_ids)

    monkeypatch.setattr("quire.queue.lease.moving.expire_call", give_time_and_build)
    assert broker.expire() == []
    assert broker.heartbeat([claims[0].claim])[0].alive


def test_a_request_given_more_time_between_the_look_and_the_end_waits_on(
    broker, clockwork, monkeypatch
):
    broker.submit(make_request(id="a"))
    clockwork.expire_queue_time("a")

    def give_time_and_build(keys, request_ids):
        assert request_ids == ["a"], "the sweep has seen that its time is over"
        clockwork.connection.zadd(keys.wait, {"a": broker.now_ms() + 60_000})
        return expire_call(keys, request_ids)

    monkeypatch.setattr("quire.queue.lease.moving.expire_call", give_time_and_build)
    assert broker.expire() == []
    assert broker.status("a").state is State.QUEUED


def test_one_sweep_ends_no_more_than_its_limit_the_longest_overdue_first(broker, connection):
    broker.submit_many([make_request(id=name) for name in "abc"])
    connection.zadd(broker.keys.wait, {"a": 3, "b": 1, "c": 2})
    assert [expired.request_id for expired in broker.expire(limit=2)] == ["b", "c"]


def test_those_who_look_after_the_schedule_look_after_the_deadlines(broker):
    broker.submit(make_request(id="a", deadline_ms=1))
    broker.promote()
    assert broker.status("a").state is State.EXPIRED


@pytest.mark.real_redis
@pytest.mark.parametrize("deadline", [None, 4_000_000_000_000])
def test_a_queued_request_takes_little_memory_besides_its_body(
    real_broker, real_connection, deadline
):
    def used():
        names = list(real_connection.scan_iter(f"{real_broker.keys.prefix}:*"))
        bodies = {key for key in names if b":b:" in key}
        sizes = {key: real_connection.memory_usage(key, samples=0) for key in names}
        return sum(size for key, size in sizes.items() if key not in bodies)

    before, count = used(), 2000
    real_broker.submit_many([make_request(deadline_ms=deadline) for _ in range(count)])
    each = (used() - before) / count
    print(f"{each:.0f} bytes per queued request")
    assert each <= MAX_BYTES_PER_QUEUED_REQUEST
