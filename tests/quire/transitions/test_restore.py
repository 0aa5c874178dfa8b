"""What a server loses of the queue around its open requests is put back, by RESTORE and SUBMIT."""

import pytest

from quire.errors import UnknownRequest
from quire.keys import GROUP
from quire.transitions.values import BackOff, Claimed, Lost, NotClaimed, NotClaimedReason
from quire.wire.output import ErrorInfo, State
from quire.wire.protocol import Priority
from tests.quire.builders import (
    claim_next,
    make_item,
    make_request,
    read_and_claim,
    submit_and_claim,
)


def restore(broker) -> dict[str, Lost]:
    """What one whole pass gives back."""
    return {one.request_id: one.lost for one in broker.restore(is_at_once=True)}


def entries_of(connection, broker) -> list[str]:
    """The requests that have an entry, stream by stream."""
    return [
        fields[b"id"].decode()
        for stream in broker.keys.all_ingress
        for _, fields in connection.xrange(stream)
    ]


def lose_entries(connection, broker, how: str) -> None:
    for stream in broker.keys.all_ingress:
        if how == "trimmed":
            connection.xtrim(stream, maxlen=0, approximate=False)
        elif how == "stream deleted":
            connection.delete(stream)
        else:
            for entry_id, _ in connection.xrange(stream):
                connection.xdel(stream, entry_id)


HOW = ("trimmed", "entries deleted", "stream deleted")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("priority", list(Priority))
def test_a_queued_request_gets_its_lost_entry_back(broker, connection, how, priority):
    broker.submit(make_request(id="a", priority=priority))
    lose_entries(connection, broker, how)
    assert restore(broker) == {"a": Lost.ENTRY}
    assert restore(broker) == {}
    assert entries_of(connection, broker) == ["a"]
    assert claim_next(broker).claim.request_id == "a"


@pytest.mark.parametrize("how", HOW)
def test_what_came_back_gets_its_entry_back_in_its_own_stream(broker, connection, clockwork, how):
    for name in ("reaped", "released"):
        claim = submit_and_claim(broker, id=name).claim
        broker.commit([make_item(claim, 0, 2)])
        if name == "released":
            broker.release([claim])
    clockwork.expire_lease("reaped")
    broker.reap()
    lose_entries(connection, broker, how)
    assert restore(broker) == {"reaped": Lost.ENTRY, "released": Lost.ENTRY}
    assert connection.xlen(broker.keys.resumed(1)) == 2
    assert restore(broker) == {}
    assert claim_next(broker).num_published == 2


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("is_keyed", [False, True])
def test_the_same_submit_puts_a_lost_entry_back(broker, connection, how, is_keyed):
    key = "k" if is_keyed else None
    broker.submit(make_request(id="a", idempotency_key=key))
    lose_entries(connection, broker, how)
    for again in ("a", "b" if is_keyed else "a"):
        submitted = broker.submit(make_request(id=again, idempotency_key=key))
        assert (submitted.request_id, submitted.created) == ("a", False)
    assert entries_of(connection, broker) == ["a"]
    assert claim_next(broker).claim.request_id == "a"


def test_a_submit_under_a_held_key_puts_back_the_entry_of_the_holder(broker, connection):
    broker.submit(make_request(id="a", idempotency_key="k"))
    lose_entries(connection, broker, "trimmed")
    assert broker.submit(make_request(id="b", idempotency_key="k")).request_id == "a"
    assert entries_of(connection, broker) == ["a"]


def test_what_is_where_it_belongs_is_left_alone(broker, connection, clockwork):
    later = broker.now_ms() + 3_600_000
    broker.submit_many([make_request(id=name) for name in ("queued", "read", "cancelled")])
    broker.cancel("cancelled")
    broker.read_ingress("slow", count=2, block_seconds=0)
    broker.submit(make_request(id="later", not_before_ms=later))
    before = entries_of(connection, broker)
    due = connection.zscore(broker.keys.delay, "later")
    assert restore(broker) == {}
    for name in ("queued", "read", "later"):
        broker.submit(make_request(id=name))
    assert entries_of(connection, broker) == before
    assert connection.zscore(broker.keys.delay, "later") == due


def test_a_claimed_request_gets_no_entry(broker, connection):
    claim = submit_and_claim(broker, id="a").claim
    assert restore(broker) == {}
    broker.submit(make_request(id="a"))
    assert entries_of(connection, broker) == []
    broker.commit([make_item(claim, 0, 2, final=True)])
    assert restore(broker) == {}


def test_who_had_read_the_lost_entry_claims_it_and_the_new_one_is_refused(broker, connection):
    broker.submit(make_request(id="a"))
    held = broker.read_ingress("slow", count=1, block_seconds=0)
    lose_entries(connection, broker, "entries deleted")
    assert restore(broker) == {"a": Lost.ENTRY}
    (answer,) = broker.claim(held)
    assert isinstance(answer, Claimed)
    refused = read_and_claim(broker, worker="other")
    assert refused == NotClaimed("a", NotClaimedReason.RUNNING)
    assert entries_of(connection, broker) == []
    broker.commit([make_item(answer.claim, 0, 2, final=True)])


def test_an_entry_with_the_id_of_a_lost_one_is_not_taken_for_it(broker, connection):
    """A stream that was deleted may give an id again."""
    broker.submit(make_request(id="a"))
    stream = broker.keys.ingress(Priority.NORMAL)
    ((entry_id, _),) = connection.xrange(stream)
    connection.delete(stream)
    connection.xadd(stream, {"id": "b"}, id=entry_id)
    assert restore(broker) == {"a": Lost.ENTRY}
    assert entries_of(connection, broker) == ["b", "a"]


@pytest.mark.parametrize("recorded", [None, "7 1-1"])
def test_what_an_older_worker_has_queued_is_put_back_when_nothing_else_waits(
    broker, connection, recorded
):
    """It records no entry, and leaves that of an earlier epoch. So nobody knows where it stands."""
    broker.submit_many([make_request(id=name) for name in "ab"])
    for name in "ab":
        key = broker.keys.request(name)
        connection.hdel(key, "entry")
        if recorded:
            connection.hset(key, "entry", recorded)
    stream = broker.keys.ingress(Priority.NORMAL)
    connection.xdel(stream, connection.xrange(stream)[0][0])
    assert restore(broker) == {}
    assert broker.submit(make_request(id="a")).created is False
    assert entries_of(connection, broker) == ["b"]
    assert claim_next(broker).claim.request_id == "b"
    assert restore(broker) == {"a": Lost.ENTRY}
    assert restore(broker) == {}
    assert claim_next(broker).claim.request_id == "a"


def test_all_that_an_older_worker_has_queued_is_put_back_together(broker, connection):
    """What one of them gets back does not look like the entries of the others."""
    names = [f"r{number}" for number in range(20)]
    broker.submit_many([make_request(id=name, priority=len(name)) for name in names])
    for name in names:
        connection.hdel(broker.keys.request(name), "entry")
    lose_entries(connection, broker, "trimmed")
    assert restore(broker) == dict.fromkeys(names, Lost.ENTRY)
    assert restore(broker) == {}


@pytest.mark.parametrize("recorded", [True, False])
def test_a_producer_leaves_to_workers_what_may_have_come_back(broker, connection, recorded):
    """It may not look into the streams of what came back."""
    claim = submit_and_claim(broker, id="a").claim
    broker.release([claim])
    if not recorded:
        connection.hdel(broker.keys.request("a"), "entry")
    lose_entries(connection, broker, "trimmed")
    broker.submit(make_request(id="a"))
    assert entries_of(connection, broker) == []
    assert restore(broker) == {"a": Lost.ENTRY}


def test_a_request_that_was_put_back_by_a_pause_is_where_its_record_says(broker, connection):
    broker.submit(make_request(id="a"))
    held = broker.read_ingress("w", count=1, block_seconds=0)
    broker.pause()
    assert broker.claim(held) == [NotClaimed("a", NotClaimedReason.PAUSED)]
    assert restore(broker) == {}
    lose_entries(connection, broker, "trimmed")
    assert restore(broker) == {"a": Lost.ENTRY}
    broker.resume()
    assert claim_next(broker).claim.request_id == "a"


def test_a_requeued_and_a_promoted_request_are_where_their_records_say(
    broker, connection, clockwork
):
    claim = submit_and_claim(broker, id="dead").claim
    broker.dead_letter(claim, "tired")
    broker.requeue(broker.dead_letters()[0], keep_tokens=False)
    broker.submit(make_request(id="later", not_before_ms=broker.now_ms() + 60_000))
    clockwork.expire_delay("later")
    broker.promote()
    assert restore(broker) == {}
    lose_entries(connection, broker, "trimmed")
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
    lose_entries(connection, broker, "trimmed")
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
    lose_entries(connection, broker, "trimmed")
    restore(broker)
    assert read_and_claim(broker) == NotClaimed("a", NotClaimedReason.DAMAGED, ended=True)
    assert broker.status("a").state is State.FAILED


def test_the_entry_of_a_request_whose_record_was_evicted_goes_at_the_claim(broker, connection):
    broker.submit(make_request(id="a"))
    connection.delete(*broker.keys.of_request("a"))
    assert read_and_claim(broker) == NotClaimed("a", NotClaimedReason.MISSING)
    assert (broker.backlog().tenants, entries_of(connection, broker)) == ({}, [])


def test_counts_without_an_open_request_are_forgotten(broker, connection):
    connection.hset(broker.keys.counts, mapping={"tokens": 9, "tenant:default": 2})
    assert restore(broker) == {}
    assert broker.backlog().tenants == {}


def test_a_damaged_record_ends_and_is_in_nobodys_way(broker, connection):
    broker.submit_many([make_request(id=name) for name in "abc"])
    lose_entries(connection, broker, "trimmed")
    connection.delete(broker.keys.request("b"))
    connection.rpush(broker.keys.request("b"), "foreign")
    connection.expire(broker.keys.request("b"), 60)
    # What the call that failed has put back before it came to the damaged one is not told.
    assert restore(broker)["c"] is Lost.ENTRY
    assert broker.status("b").state is State.FAILED
    assert entries_of(connection, broker) == ["a", "c"]


def test_what_is_no_id_among_the_open_requests_stops_nobody(broker, connection):
    broker.submit(make_request(id="a"))
    connection.hset(broker.keys.open, b"\xff\xfe", "queued 1 default")
    lose_entries(connection, broker, "trimmed")
    assert restore(broker) == {"a": Lost.ENTRY}
    connection.hdel(broker.keys.open, b"\xff\xfe")


def test_a_destroyed_group_gives_all_entries_again(broker, connection):
    broker.submit_many([make_request(id=name) for name in "ab"])
    broker.read_ingress("slow", count=1, block_seconds=0)
    connection.xgroup_destroy(broker.keys.ingress(Priority.NORMAL), GROUP)
    assert restore(broker) == {}
    entries = broker.read_ingress("w", count=9, block_seconds=0)
    assert [entry.request_id for entry in entries] == ["a", "b"]


def test_all_workers_together_look_no_more_often_than_one(make_broker, connection, monkeypatch):
    monkeypatch.setattr("quire.broker.moving.OPEN_PER_TURN", 10)
    one, other = make_broker(), make_broker()
    one.submit_many([make_request(id=f"r{number:04}") for number in range(1000)])
    lose_entries(connection, one, "trimmed")
    first = one.restore()
    assert 10 <= len(first) < 200
    assert other.restore() == []
    seen = {restored.request_id for restored in first}
    while True:
        # Whoever comes next goes on at the same place.
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
    lose_entries(connection, broker, "trimmed")
    assert [restored.request_id for restored in broker.restore()] == ["a"]
