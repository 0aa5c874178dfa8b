"""What a server loses of the queue around its open requests is put back, by RESTORE and SUBMIT."""

import pytest

from quire.errors import UnknownRequest
from quire.keys import GROUP
from quire.queue.claim.claim import Claimed, NotClaimed, NotClaimedReason
from quire.queue.lease.lease import BackOff
from quire.queue.repair.restore import Lost
from quire.wire.output import ErrorInfo, State
from quire.wire.protocol import Priority
from tests.quire.builders import (
    claim_next,
    make_item,
    make_request,
    read_and_claim,
    submit_and_claim,
)
from tests.quire.servers import on_the_real_server


def restore(broker) -> dict[str, Lost]:
    """What one whole pass gives back."""
    return {one.request_id: one.lost for one in broker.restore(is_at_once=True)}


def ranked(connection, broker) -> list[str]:
    """The requests that are in a rank set, the first to be claimed first."""
    return [candidate.request_id for candidate in broker.peek(count=100)]


def num_tickets(connection, broker) -> int:
    return sum(connection.xlen(stream) for stream in broker.keys.all_ingress)


def lose_entries(connection, broker, how: str = "removed") -> None:
    for ranks, stream in zip(broker.keys.all_ranks, broker.keys.all_ingress, strict=True):
        if how == "removed":
            connection.zremrangebyrank(ranks, 0, -1)
        else:
            connection.delete(ranks)
        if how == "streams deleted, too":
            connection.delete(stream)
        elif how == "streams trimmed, too":
            connection.xtrim(stream, maxlen=0, approximate=False)


HOW = ("removed", "deleted", "streams deleted, too", "streams trimmed, too")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("priority", list(Priority))
def test_a_queued_request_gets_its_lost_entry_back(broker, connection, how, priority):
    broker.submit(make_request(id="a", priority=priority))
    lose_entries(connection, broker, how)
    assert restore(broker) == {"a": Lost.ENTRY}
    assert restore(broker) == {}
    assert (ranked(connection, broker), num_tickets(connection, broker)) == (["a"], 1)
    assert claim_next(broker).claim.request_id == "a"
    assert num_tickets(connection, broker) == 0


@pytest.mark.parametrize("how", HOW)
def test_what_came_back_gets_its_arrival_back(broker, connection, clockwork, how):
    for name in ("reaped", "released"):
        claim = submit_and_claim(broker, id=name).claim
        broker.commit([make_item(claim, 0, 2)])
        if name == "released":
            broker.release([claim])
    broker.submit(make_request(id="new"))
    clockwork.expire_lease("reaped")
    broker.reap()
    lose_entries(connection, broker, how)
    assert restore(broker) == dict.fromkeys(("reaped", "released", "new"), Lost.ENTRY)
    assert restore(broker) == {}
    assert ranked(connection, broker) == ["reaped", "released", "new"]
    assert num_tickets(connection, broker) == 3


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("is_keyed", [False, True])
def test_the_same_submit_puts_a_lost_entry_back(broker, connection, how, is_keyed):
    key = "k" if is_keyed else None
    broker.submit(make_request(id="a", idempotency_key=key))
    lose_entries(connection, broker, how)
    for again in ("a", "b" if is_keyed else "a"):
        submitted = broker.submit(make_request(id=again, idempotency_key=key))
        assert (submitted.request_id, submitted.created) == ("a", False)
    assert (ranked(connection, broker), num_tickets(connection, broker)) == (["a"], 1)
    assert claim_next(broker).claim.request_id == "a"


def test_a_submit_under_a_held_key_puts_back_the_entry_of_the_holder(broker, connection):
    broker.submit(make_request(id="a", idempotency_key="k"))
    lose_entries(connection, broker)
    assert broker.submit(make_request(id="b", idempotency_key="k")).request_id == "a"
    assert ranked(connection, broker) == ["a"]


def test_what_is_where_it_belongs_is_left_alone(broker, connection, clockwork):
    later = broker.now_ms() + 3_600_000
    broker.submit_many([make_request(id=name) for name in ("queued", "read", "cancelled")])
    broker.cancel("cancelled")
    broker.peek(count=2, block_seconds=0)
    broker.submit(make_request(id="later", not_before_ms=later))
    before = ranked(connection, broker)
    due = connection.zscore(broker.keys.delay, "later")
    assert restore(broker) == {}
    for name in ("queued", "read", "later"):
        broker.submit(make_request(id=name))
    assert ranked(connection, broker) == before
    assert connection.zscore(broker.keys.delay, "later") == due


def test_a_claimed_request_gets_no_entry(broker, connection):
    claim = submit_and_claim(broker, id="a").claim
    assert restore(broker) == {}
    broker.submit(make_request(id="a"))
    assert ranked(connection, broker) == []
    broker.commit([make_item(claim, 0, 2, final=True)])
    assert restore(broker) == {}


def test_a_worker_that_had_found_a_request_before_it_was_lost_claims_it(broker, connection):
    broker.submit(make_request(id="a"))
    held = broker.peek(count=1, block_seconds=0)
    lose_entries(connection, broker)
    (answer,) = broker.claim(held)
    assert isinstance(answer, Claimed)
    assert restore(broker) == {}
    assert ranked(connection, broker) == []


def test_missing_tickets_are_added_and_are_no_loss(broker, connection):
    broker.submit_many([make_request(id=name) for name in "abc"])
    lose_streams(connection, broker)
    # A missing one is not missed.
    assert claim_next(broker).claim.request_id == "a"
    assert restore(broker) == {}
    assert num_tickets(connection, broker) == 2
    assert restore(broker) == {}
    assert num_tickets(connection, broker) == 2


def lose_streams(connection, broker) -> None:
    connection.delete(*broker.keys.all_ingress)
    broker.ensure_groups()


def test_tickets_of_lost_ranks_are_used_up_and_come_back_with_them(broker, connection):
    names = [f"r{number}" for number in range(20)]
    broker.submit_many([make_request(id=name, priority=int(name[1:]) % 4) for name in names])
    before = ranked(connection, broker)
    lose_entries(connection, broker)
    assert (broker.balance(), num_tickets(connection, broker)) == (20, 0)
    assert restore(broker) == dict.fromkeys(names, Lost.ENTRY)
    assert (ranked(connection, broker), num_tickets(connection, broker)) == (before, 20)


def test_a_request_that_was_refused_in_a_pause_waits_on(broker, connection):
    broker.submit(make_request(id="a"))
    held = broker.peek(count=1, block_seconds=0)
    broker.pause()
    assert broker.claim(held) == [NotClaimed("a", NotClaimedReason.PAUSED)]
    assert restore(broker) == {}
    lose_entries(connection, broker)
    assert restore(broker) == {"a": Lost.ENTRY}
    broker.resume()
    assert claim_next(broker).claim.request_id == "a"


def test_a_requeued_and_a_promoted_request_get_their_entries_back(broker, connection, clockwork):
    claim = submit_and_claim(broker, id="dead").claim
    broker.dead_letter(claim, "tired")
    broker.requeue(broker.dead_letters()[0], keep_tokens=False)
    broker.submit(make_request(id="later", not_before_ms=broker.now_ms() + 60_000))
    clockwork.expire_delay("later")
    broker.promote()
    assert restore(broker) == {}
    lose_entries(connection, broker)
    assert restore(broker) == {"dead": Lost.ENTRY, "later": Lost.ENTRY}


@pytest.mark.parametrize("deadline", [None, 3_600_000])
def test_a_scheduled_request_gets_its_lost_time_back(broker, connection, deadline):
    due = broker.now_ms() + 60_000
    deadline_ms = deadline and broker.now_ms() + deadline
    broker.submit(make_request(id="a", not_before_ms=due, deadline_ms=deadline_ms))
    connection.delete(broker.keys.delay)
    assert restore(broker) == {"a": Lost.DELAY}
    assert restore(broker) == {}
    found = connection.zscore(broker.keys.delay, "a")
    # With a deadline nothing tells when it was to begin, so it may begin now.
    assert found == due if deadline is None else found <= broker.now_ms()


def test_a_retry_gets_its_lost_time_back(broker, connection):
    claim = submit_and_claim(broker, id="a").claim
    broker.fail(claim, ErrorInfo("x", "y"), retry=BackOff(first_seconds=60))
    due = connection.zscore(broker.keys.delay, "a")
    connection.delete(broker.keys.delay)
    assert restore(broker) == {"a": Lost.DELAY}
    assert connection.zscore(broker.keys.delay, "a") == due


def test_a_running_request_gets_its_lost_lease_back(broker, connection, clockwork):
    dead = submit_and_claim(broker, id="dead").claim
    connection.delete(broker.keys.lease)
    assert broker.reap() == []
    assert restore(broker) == {"dead": Lost.LEASE}
    assert [reply.alive for reply in broker.heartbeat([dead])] == [True]
    clockwork.expire_lease("dead")
    assert [reaped.state for reaped in broker.reap()] == [State.QUEUED]


def test_a_waiting_request_gets_its_lost_limit_back(broker, connection, clockwork):
    broker.submit(make_request(id="a"))
    connection.delete(broker.keys.wait)
    assert restore(broker) == {"a": Lost.WAIT}
    clockwork.expire_queue_time("a")
    assert [expired.request_id for expired in broker.expire()] == ["a"]


@pytest.mark.parametrize("state", ["queued", "running"])
def test_what_is_left_of_a_request_that_was_evicted_is_counted_no_more(broker, connection, state):
    broker.submit(make_request(id="g~a"))
    if state == "running":
        claim_next(broker)
    lose_entries(connection, broker)
    connection.delete(broker.keys.lease, *broker.keys.of_request("g~a"))
    assert broker.backlog().tenants == {"default": 1}
    assert restore(broker) == {"g~a": Lost.RECORD}
    assert broker.backlog().tenants == {}
    assert broker.open_members("g") == []
    with pytest.raises(UnknownRequest):
        broker.status("g~a")


def test_a_request_whose_message_was_evicted_ends_and_says_why(broker, connection):
    broker.submit(make_request(id="a"))
    connection.delete(broker.keys.body("a"))
    lose_entries(connection, broker)
    restore(broker)
    assert read_and_claim(broker) == NotClaimed("a", NotClaimedReason.DAMAGED, ended=True)
    assert broker.status("a").state is State.FAILED


def test_the_entry_of_a_request_whose_record_was_evicted_goes_at_the_claim(broker, connection):
    broker.submit(make_request(id="a"))
    connection.delete(*broker.keys.of_request("a"))
    assert read_and_claim(broker) == NotClaimed("a", NotClaimedReason.MISSING)
    assert (broker.backlog().tenants, ranked(connection, broker)) == ({}, [])


def test_counts_without_an_open_request_are_forgotten(broker, connection):
    connection.hset(broker.keys.counts, mapping={"tokens": 9, "tenant:default": 2})
    assert restore(broker) == {}
    assert broker.backlog().tenants == {}


def test_a_damaged_record_ends_and_is_in_nobodys_way(broker, connection):
    broker.submit_many([make_request(id=name) for name in "abc"])
    lose_entries(connection, broker)
    connection.delete(broker.keys.request("b"))
    connection.rpush(broker.keys.request("b"), "foreign")
    connection.expire(broker.keys.request("b"), 60)
    # What the call that failed has put back before it came to the damaged one is not told.
    restore(broker)
    assert broker.status("b").state is State.FAILED
    assert ranked(connection, broker) == ["a", "c"]


def test_what_is_no_id_among_the_open_requests_stops_nobody(broker, connection):
    broker.submit(make_request(id="a"))
    connection.hset(broker.keys.open, b"\xff\xfe", "queued 1 default")
    lose_entries(connection, broker)
    assert restore(broker) == {"a": Lost.ENTRY}
    connection.hdel(broker.keys.open, b"\xff\xfe")


def test_a_destroyed_group_hides_nothing(broker, connection):
    broker.submit_many([make_request(id=name) for name in "ab"])
    broker.peek(count=1, block_seconds=0)
    connection.xgroup_destroy(broker.keys.ingress(Priority.NORMAL), GROUP)
    assert restore(broker) == {}
    entries = broker.peek(count=9, block_seconds=0)
    assert [entry.request_id for entry in entries] == ["a", "b"]


@on_the_real_server
def test_all_workers_together_look_no_more_often_than_one(make_broker, connection, monkeypatch):
    monkeypatch.setattr("quire.queue.repair.restore.OPEN_PER_TURN", 10)
    one, other = make_broker(), make_broker()
    one.submit_many([make_request(id=f"r{number:04}") for number in range(1000)])
    lose_entries(connection, one)
    first = one.restore()
    assert 10 <= len(first) < 200
    assert other.restore() == []
    seen = {restored.request_id for restored in first}
    while True:
        # The next one goes on at the same cursor.
        connection.hset(one.keys.survey, "due_ms", 1)
        part = {restored.request_id for restored in other.restore()}
        assert not part & seen
        seen |= part
        one, other = other, one
        if connection.hget(one.keys.survey, "cursor") == b"0":
            break
    assert len(seen) == 1000
    rest = int(connection.hget(one.keys.survey, "due_ms")) - one.now_ms()
    assert 20_000 < rest <= 30_000


def test_a_clock_that_was_put_back_stops_no_comparison(broker, connection):
    broker.restore()
    connection.hset(broker.keys.survey, "due_ms", broker.now_ms() + 86_400_000)
    broker.submit(make_request(id="a"))
    lose_entries(connection, broker)
    assert [restored.request_id for restored in broker.restore()] == ["a"]
