"""The ends of a queue: each told once, by whichever script has ended the request."""

import pytest
from redis.exceptions import ResponseError

from quire.errors import UnknownRequest
from quire.keys import Keys
from quire.queue.ends.telling import MAX_TOLD_PER_READ, _position_of
from quire.queue.lease.lease import BackOff
from quire.queue.repair.damage import condemn_call
from quire.records import ErrorInfo, FinishReason, State, Usage
from quire.wire.protocol import Priority
from tests.quire.builders import (
    claim_next,
    make_completion,
    make_item,
    make_request,
    pass_moment,
    submit_and_claim,
)
from tests.quire.servers import on_the_real_server


def told(broker):
    return [(end.request_id, str(end.state), end.finish_reason) for end in broker.told(after="0-0")]


def test_an_end_tells_who_asked_how_it_ended_and_what_it_used(broker):
    claimed = submit_and_claim(broker, id="g~a", tenant="acme", priority=Priority.HIGH)
    usage = Usage(prompt_tokens=3, cached_tokens=2)
    item = make_item(claimed.claim, 0, 4, final=True)
    completion = make_completion("g~a", usage=usage, model="abacus")
    before = broker.now_ms() / 1000
    broker.commit([type(item)(item.claim, 0, item.token_ids, item.text, completion=completion)])
    (end,) = broker.told(after="0-0")
    assert (end.request_id, end.group, end.tenant) == ("g~a", "g", "acme")
    assert (end.priority, end.model) == (Priority.HIGH, "abacus")
    assert (end.state, end.finish_reason) == (State.COMPLETED, FinishReason.LENGTH)
    assert end.usage == Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2)
    assert end.submitted_at <= before <= end.ended_at <= broker.now_ms() / 1000
    assert broker.told(after=end.position) == []


def test_every_way_to_end_is_told_once(broker, clockwork, connection):
    for name in ("done", "rejected", "spoilt", "over"):
        broker.submit(make_request(id=name))
        claimed = claim_next(broker)
        if name == "done":
            broker.commit([make_item(claimed.claim, 0, 1, final=True)] * 2)
        elif name == "rejected":
            broker.fail(claimed.claim, ErrorInfo("engine_error", "no"), retry=None)
            broker.fail(claimed.claim, ErrorInfo("engine_error", "no"), retry=None)
        elif name == "spoilt":
            broker.dead_letter(claimed.claim, "undecodable")
        else:
            broker.cancel(name)
            clockwork.expire_lease(name)
            broker.reap()
    broker.submit(make_request(id="early"))
    broker.cancel("early")
    broker.cancel("early")
    broker.submit(make_request(id="late"))
    clockwork.expire_queue_time("late")
    broker.expire()
    broker.submit(make_request(id="damaged"))
    connection.hset(broker.keys.request("damaged"), "epoch", "x")
    error = ErrorInfo("damaged", "epoch")
    done = make_completion("", state=State.FAILED, finish_reason=FinishReason.ERROR, error=error)
    call = condemn_call(broker.keys, "damaged", reason="damaged", done=done.encode())
    assert broker._scripts.run("condemn", call) == 1
    assert told(broker) == [
        ("done", "completed", FinishReason.LENGTH),
        ("rejected", "failed", FinishReason.ERROR),
        ("spoilt", "failed", FinishReason.REJECTED),
        ("over", "cancelled", FinishReason.CANCELLED),
        ("early", "cancelled", FinishReason.CANCELLED),
        ("late", "expired", FinishReason.DEADLINE),
        ("damaged", "failed", FinishReason.ERROR),
    ]


def test_a_request_that_goes_on_is_not_told(broker, clockwork):
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 2)])
    broker.fail(claimed.claim, ErrorInfo("engine_error", "again"), retry=BackOff(10, 10))
    clockwork.expire_delay("a")
    broker.promote()
    broker.release([claim_next(broker).claim])
    assert told(broker) == []


def test_the_end_of_another_life_is_told_too(broker):
    claimed = submit_and_claim(broker, id="a")
    broker.dead_letter(claimed.claim, "undecodable")
    pass_moment(broker)
    (letter,) = broker.dead_letters()
    broker.requeue(letter, keep_tokens=True)
    broker.commit([make_item(claim_next(broker).claim, 0, 1, final=True)])
    assert [state for _, state, _ in told(broker)] == ["failed", "completed"]


def test_a_request_that_expires_unread_is_not_told(broker, connection):
    """It has no terminal entry."""
    broker.submit(make_request(id="a"))
    connection.delete(*broker.keys.of_request("a"))
    with pytest.raises(UnknownRequest):
        broker.cancel("a")
    broker.claim(broker.peek(count=1))
    assert told(broker) == []


@on_the_real_server
def test_operators_set_how_many_ends_are_kept(broker, connection):
    broker.keep_ends(100)
    assert broker.control().ends_kept == 100
    for number in range(350):
        broker.submit(make_request(id=str(number)))
        broker.cancel(str(number))
    # Redis trims whole nodes of 100 entries.
    assert 100 <= connection.xlen(broker.keys.ends) <= 300
    assert told(broker)[-1][0] == "349"
    with pytest.raises(ValueError, match="from 0"):
        broker.keep_ends(-1)
    for number in range(350):
        connection.delete(*broker.keys.of_request(str(number)))


def test_a_queue_that_keeps_no_ends_tells_none(broker, connection):
    broker.keep_ends(0)
    broker.submit(make_request(id="a"))
    broker.cancel("a")
    assert (told(broker), connection.exists(broker.keys.ends)) == ([], 0)
    connection.delete(*broker.keys.of_request("a"))


def test_what_is_no_number_counts_as_not_set(broker, connection):
    connection.hset(broker.keys.control, "ends", "many")
    broker.submit(make_request(id="a"))
    broker.cancel("a")
    assert (len(told(broker)), broker.control().ends_kept) == (1, 10_000)


def test_a_foreign_value_under_the_key_keeps_no_request_from_its_end(broker, connection):
    connection.set(broker.keys.ends, "mine")
    broker.submit(make_request(id="a"))
    broker.cancel("a")
    assert told(broker) == [("a", "cancelled", FinishReason.CANCELLED)]


def test_an_entry_that_is_no_end_is_left_out(broker, connection, caplog):
    connection.xadd(broker.keys.ends, {"id": "x", "done": b"\xff"})
    assert told(broker) == []
    assert "left out" in caplog.text
    delivery = broker.deliver("sinks", "one")
    assert (delivery.ends, len(delivery.positions)) == ([], 1)


def test_the_ends_of_batches_are_passed_over_and_do_not_end_a_wait(broker, connection):
    fields = {"tenant": "t", "state": "failed", "submitted_ms": 7, "total": 3, "completed": 1}
    for number in range(MAX_TOLD_PER_READ + 1):
        connection.xadd(broker.keys.ends, fields | {"batch": f"batch_{number}", "failed": 2})
    assert told(broker) == []
    assert broker.told(after="0-0", block_seconds=0.01) == []
    broker.submit(make_request(id="a"))
    broker.cancel("a")
    assert told(broker) == [("a", "cancelled", FinishReason.CANCELLED)]
    delivery = broker.deliver("sinks", "one")
    assert (len(delivery.positions), len(delivery.batches)) == (MAX_TOLD_PER_READ,) * 2
    first = delivery.batches[0]
    assert (first.batch_id, first.tenant, first.status) == ("batch_0", "t", "failed")
    assert (first.total, first.completed, first.failed, first.created_at) == (3, 1, 2, 0.007)


def ended(broker, *names):
    for name in names:
        broker.submit(make_request(id=name))
        broker.cancel(name)


def names_of(delivery):
    return [end.request_id for end in delivery.ends]


def test_the_consumers_of_a_group_share_the_ends(broker):
    ended(broker, "a")
    one = broker.deliver("sinks", "one")
    ended(broker, "b")
    other = broker.deliver("sinks", "two")
    assert (names_of(one), names_of(other)) == (["a"], ["b"])
    assert names_of(broker.deliver("others", "one")) == ["a", "b"]


def test_what_is_not_acknowledged_comes_again_to_its_consumer_or_to_another(broker):
    ended(broker, "a", "b")
    delivery = broker.deliver("sinks", "one")
    broker.acknowledge("sinks", delivery.positions[:1])
    assert names_of(broker.delivered("sinks", "one")) == ["b"]
    assert names_of(broker.take_over("sinks", "two", idle_seconds=60)) == []
    assert names_of(broker.take_over("sinks", "two", idle_seconds=0)) == ["b"]
    assert names_of(broker.delivered("sinks", "one")) == []
    broker.acknowledge("sinks", broker.delivered("sinks", "two").positions)
    assert names_of(broker.take_over("sinks", "one", idle_seconds=0)) == []


def test_a_group_that_the_server_has_lost_is_there_again(broker, connection):
    ended(broker, "a")
    broker.deliver("sinks", "one")
    connection.xgroup_destroy(broker.keys.ends, "sinks")
    assert names_of(broker.deliver("sinks", "one")) == ["a"]


def lose_group(broker, connection):
    connection.xgroup_destroy(broker.keys.ends, "sinks")


def test_a_lost_group_continues_after_what_its_consumers_have_handled(broker, connection):
    ended(broker, "a", "b", "c", "d")
    one = broker.deliver("sinks", "one")
    broker.acknowledge("sinks", one.positions)
    ended(broker, "e", "f")
    lose_group(broker, connection)
    assert names_of(broker.deliver("sinks", "one")) == ["e", "f"]


def test_what_a_consumer_has_not_handled_comes_again_from_a_lost_group(broker, connection):
    ended(broker, "a", "b")
    broker.acknowledge("sinks", broker.deliver("sinks", "one").positions)
    ended(broker, "c")
    slow = broker.deliver("sinks", "slow")
    ended(broker, "d")
    broker.acknowledge("sinks", broker.deliver("sinks", "one").positions)
    lose_group(broker, connection)
    # Nobody knows the group yet: what the slow one does now is noted by no group.
    broker.acknowledge("sinks", slow.positions)
    assert names_of(broker.deliver("sinks", "one")) == ["c", "d"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_group_that_never_was_begins_with_the_next_end(broker, connection, is_lost):
    ended(broker, "a")
    assert broker.begin("sinks")
    ended(broker, "b")
    # The process may have died before its first read, or the server may have lost the group.
    assert not broker.begin("sinks")
    if is_lost:
        broker.delivered("sinks", "one")
        lose_group(broker, connection)
        assert not broker.begin("sinks")
    assert names_of(broker.deliver("sinks", "one")) == ["b"]


@pytest.mark.parametrize("mark", ["junk", b"\xff", "99999999999999-0"])
def test_a_mark_that_is_damaged_or_after_all_ends_hides_none(broker, connection, mark):
    ended(broker, "a")
    connection.hset(broker.keys.ends_read, "sinks", mark)
    assert names_of(broker.deliver("sinks", "one")) == ["a"]


def test_so_does_one_of_a_queue_without_an_end(broker):
    assert broker.begin("sinks")
    ended(broker, "a")
    assert names_of(broker.deliver("sinks", "one")) == ["a"]


def test_a_group_that_is_there_stays_where_it_is(broker, connection):
    ended(broker, "a")
    # As an earlier version creates it.
    connection.xgroup_create(broker.keys.ends, "sinks", id="0")
    assert not broker.begin("sinks")
    assert names_of(broker.deliver("sinks", "one")) == ["a"]


@pytest.mark.parametrize("num_pending", [0, 1])
def test_a_group_of_an_earlier_version_goes_on_from_its_position_after_a_loss(
    broker, connection, num_pending
):
    """It has no mark until its first acknowledgement here, and the server loses it before."""
    ended(broker, "a", "b")
    connection.xgroup_create(broker.keys.ends, "sinks", id="0")
    positions = broker.deliver("sinks", "one").positions
    connection.xack(broker.keys.ends, "sinks", *positions[: 2 - num_pending])
    assert not broker.begin("sinks")
    ended(broker, "c")
    lose_group(broker, connection)
    assert not broker.begin("sinks")
    assert names_of(broker.deliver("sinks", "one")) == [*["b"] * num_pending, "c"]


def test_a_replay_that_a_server_loses_before_its_first_acknowledgement_is_no_new_group(
    broker, connection
):
    ended(broker, "a")
    assert broker.begin("sinks", from_oldest=True)
    assert names_of(broker.deliver("sinks", "one")) == ["a"]
    lose_group(broker, connection)
    # The next process is started without it.
    assert not broker.begin("sinks")
    assert names_of(broker.deliver("sinks", "one")) == ["a"]


def test_a_position_at_which_another_consumer_works_is_no_mark(broker, connection):
    """Delivered between the two reads: not handled, but behind the last delivered one."""
    ended(broker, "a")
    broker.deliver("sinks", "one")
    (group,) = connection.xinfo_groups(broker.keys.ends)
    nothing_yet = {"pending": 0, "min": None, "max": None, "consumers": []}
    assert _position_of("sinks", nothing_yet, [group]) is None
    assert _position_of("sinks", nothing_yet, ResponseError("NOPERM")) is None


def test_the_ends_of_a_shard_are_one_key():
    assert Keys("q", 2).ends == "quire:{q.2}:ends"
