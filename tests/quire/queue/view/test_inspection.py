"""What an onlooker sees of a queue. Time is moved by giving entries old ids and long idle times."""

import pytest
from redis.exceptions import ResponseError

from quire.errors import BrokerUnavailable
from quire.keys import Keys
from quire.queue.view.inspection import IngressState, inspect_shards
from quire.wire.protocol import Priority
from tests.quire.builders import claim_next, make_item, make_request, pass_moment

#: How far an age may be off: the tests of a busy machine run slowly.
LEEWAY_SECONDS = 60.0


def look(broker, connection):
    (state,) = inspect_shards(connection, [broker.keys])
    return state


def ingress(broker, connection, priority=Priority.NORMAL) -> IngressState:
    (found,) = [s for s in look(broker, connection).ingress if s.priority == priority]
    return found


def counts(state: IngressState) -> tuple[int, int]:
    return state.num_undelivered, state.num_queued


def add_old_entry(broker, connection, *, seconds: int) -> None:
    """An entry that has been in the stream of normal requests for so long."""
    entered_ms = broker.now_ms() - 1000 * seconds
    connection.xadd(broker.keys.ingress(Priority.NORMAL), {"id": "old"}, id=f"{entered_ms}-0")


def test_a_queue_nobody_has_used_is_empty_and_not_an_error(connection):
    (state,) = inspect_shards(connection, [Keys("never-used")])

    assert [s.priority for s in state.ingress] == list(Priority)
    assert {counts(s) for s in state.ingress} == {(0, 0)}
    assert {s.undelivered_seconds for s in state.ingress} == {0.0}
    assert (state.num_leases, state.num_expired_leases, state.num_dead_letters) == (0, 0, 0)
    assert (state.num_scheduled, state.num_due, state.is_paused) == (0, 0, False)
    assert state.workers == ()


def test_a_request_is_undelivered_then_leased_then_gone(broker, connection):
    broker.submit(make_request(id="a", priority="high"))
    state = ingress(broker, connection, Priority.HIGH)
    assert counts(state) == (1, 1)

    claimed = claim_next(broker)
    state = ingress(broker, connection, Priority.HIGH)
    assert counts(state) == (0, 0)
    assert look(broker, connection).num_leases == 1

    broker.commit([make_item(claimed.claim, 0, 2, final=True)])
    assert look(broker, connection).num_leases == 0


def test_a_queued_request_that_is_in_no_rank_set_is_lost(broker, connection):
    broker.submit_many([make_request(id=name) for name in "abc"])
    assert look(broker, connection).num_lost == 0
    # Whatever tickets there are.
    connection.zrem(broker.keys.rank(1), "b")
    assert look(broker, connection).num_lost == 1
    connection.delete(*broker.keys.all_ingress)
    assert look(broker, connection).num_lost == 1
    broker.restore(is_at_once=True)


def test_requests_that_have_ended_wait_no_more_though_their_entries_do(broker, connection):
    """Nobody has to be woken for them, and without a worker their entries stay for ever."""
    soon = broker.now_ms() + 60_000
    broker.submit_many([make_request(id=name) for name in "abc"])
    broker.submit(make_request(id="later", not_before_ms=soon))
    assert look(broker, connection).num_queued == 3
    claim_next(broker)
    assert look(broker, connection).num_queued == 2
    broker.cancel("b")
    assert look(broker, connection).num_queued == 1
    broker.cancel("c")
    assert look(broker, connection).num_queued == 0
    assert counts(ingress(broker, connection)) == (2, 0)


def test_requests_are_counted_by_class(broker, connection):
    broker.submit_many([make_request(priority=priority) for priority in ("low", "low", "critical")])

    waiting = {s.priority: s.num_undelivered for s in look(broker, connection).ingress}
    assert waiting == {Priority.LOW: 2, Priority.NORMAL: 0, Priority.HIGH: 0, Priority.CRITICAL: 1}


def test_requests_that_came_before_the_first_worker_are_counted(connection):
    keys = Keys("no-group-yet")
    connection.xadd(keys.ingress(Priority.NORMAL), {"id": "a"}, id="1000-0")
    connection.zadd(keys.wait, {"a": 1e13})
    try:
        (state,) = inspect_shards(connection, [keys])
    finally:
        connection.delete(keys.ingress(Priority.NORMAL), keys.wait)

    assert counts(state.ingress[Priority.NORMAL]) == (1, 0)
    assert state.ingress[Priority.NORMAL].undelivered_seconds > LEEWAY_SECONDS


def test_the_age_of_the_backlog_is_that_of_the_first_undelivered_entry(broker, connection):
    add_old_entry(broker, connection, seconds=600)
    broker.submit(make_request())
    age = ingress(broker, connection).undelivered_seconds
    assert 600 <= age < 600 + LEEWAY_SECONDS

    broker.balance()
    assert 0 <= ingress(broker, connection).undelivered_seconds < LEEWAY_SECONDS


def test_the_age_of_the_backlog_is_not_less_than_that_of_the_request_due_next(broker, connection):
    """It may be older than all tickets, which are used up in the order in which they came."""
    broker.submit(make_request(id="a"))
    before = int(connection.hget(broker.keys.request("a"), "arrival"))
    connection.hset(broker.keys.request("a"), "arrival", before - 601_000_000)
    age = ingress(broker, connection).undelivered_seconds
    assert 600 <= age < 600 + LEEWAY_SECONDS


def test_a_backlog_is_counted_where_the_server_tells_no_lag(broker, connection):
    broker.submit_many([make_request() for _ in range(4)])
    claim_next(broker)
    # Deleting what nobody has read makes the lag unknown to servers that have one.
    stream = broker.keys.ingress(Priority.NORMAL)
    waiting = connection.xrange(stream)
    connection.xdel(stream, waiting[1][0])

    assert counts(ingress(broker, connection)) == (2, 3)


def test_a_scheduled_request_is_due_once_its_time_has_come(broker, connection):
    later_ms = broker.now_ms() + 3_600_000
    for name in ("later", "now"):
        broker.submit(make_request(id=name, not_before_ms=later_ms))
    connection.zadd(broker.keys.delay, {"now": 1})

    state = look(broker, connection)
    assert (state.num_scheduled, state.num_due) == (2, 1)
    assert {counts(s) for s in state.ingress} == {(0, 0)}


def test_a_pause_is_seen_until_it_ends(broker, connection):
    broker.pause("maintenance")
    assert look(broker, connection).is_paused

    broker.resume()
    assert not look(broker, connection).is_paused


def test_an_expired_lease_is_told_from_a_live_one(broker, connection, clockwork):
    broker.submit_many([make_request(id="dead"), make_request(id="alive")])
    claim_next(broker), claim_next(broker)
    clockwork.expire_lease("dead")

    state = look(broker, connection)
    assert (state.num_leases, state.num_expired_leases) == (2, 1)


def test_a_worker_that_has_claimed_or_renewed_since_is_told_from_one_of_which_nothing_was_heard(
    broker,
):
    broker.submit_many([make_request(id=name) for name in "ab"])
    renewed, silent = claim_next(broker), claim_next(broker)
    assert silent
    since = broker.now_ms()
    pass_moment(broker, since)
    assert broker.num_unheard(since) == 2
    broker.heartbeat([renewed.claim])
    assert broker.num_unheard(since) == 1


def test_dead_letters_are_counted(broker, connection):
    broker.submit(make_request(id="a"))
    broker.dead_letter(claim_next(broker).claim, "undecodable")

    assert look(broker, connection).num_dead_letters == 1


def test_workers_are_those_of_the_registry(broker, connection):
    broker.beat_worker("w1", "ready", {"claims": 3})
    broker.beat_worker("w2", "draining", {})

    seen = {info.name: (info.state, info.load) for info in look(broker, connection).workers}
    assert seen == {"w1": ("ready", {"claims": 3}), "w2": ("draining", {})}


def test_shards_are_answered_in_the_order_they_were_asked_for(broker, connection):
    broker.submit(make_request())

    states = inspect_shards(connection, [Keys("other"), broker.keys, Keys("another")])
    waiting = [sum(s.num_undelivered for s in state.ingress) for state in states]
    assert waiting == [0, 1, 0]


def test_looking_changes_nothing(broker, connection):
    broker.submit_many([make_request(), make_request()])
    broker.peek(count=1, block_seconds=0)

    def everything() -> dict[bytes, bytes]:
        found = connection.scan_iter(match=f"{broker.keys.prefix}:*")
        return {key: connection.dump(key) for key in found}

    before = everything()
    look(broker, connection)
    look(broker, connection)
    assert everything() == before


def test_a_key_of_another_kind_is_an_error_and_not_an_empty_queue(broker, connection):
    connection.delete(broker.keys.dead)
    connection.set(broker.keys.dead, "not a stream", px=60_000)

    with pytest.raises(BrokerUnavailable) as error:
        look(broker, connection)
    assert isinstance(error.value.__cause__, ResponseError)
