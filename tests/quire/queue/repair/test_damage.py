"""A request whose keys were spoilt ends alone, costs its neighbours nothing, and blocks nobody."""

import logging

import pytest

from quire.errors import ProtocolError
from quire.queue.claim.claim import Claimed, NotClaimed, NotClaimedReason
from quire.queue.lease.moving import Expired, Promoted, Reaped
from quire.queue.request.claims import new_owner
from quire.wire.output import Completion, FinishReason, State
from tests.quire.books import unbalanced
from tests.quire.builders import claim_next, make_item, make_request, read_all, submit_and_claim


def _another_type(kind):
    def spoil(connection, keys):
        key = getattr(keys, kind)("b")
        connection.delete(key)
        connection.rpush(key, "foreign")
        connection.expire(key, 600)

    return spoil


def _field(name, value):
    def spoil(connection, keys):
        if value is None:
            connection.hdel(keys.request("b"), name)
        else:
            connection.hset(keys.request("b"), name, value)

    return spoil


def _books(entry):
    def spoil(connection, keys):
        connection.hset(keys.open, "b", entry)

    return spoil


def _entry(entry_id, **fields):
    def spoil(connection, keys):
        connection.xadd(keys.output("b"), fields, id=entry_id)
        connection.expire(keys.output("b"), 600)

    return spoil


#: What may become of the keys of the request `b`, and no transition would do.
DAMAGES = {
    "a record of another type": _another_type("request"),
    "a message of another type": _another_type("body"),
    "no message": lambda connection, keys: connection.delete(keys.body("b")),
    "a log of another type": _another_type("output"),
    "an epoch that is no number": _field("epoch", "many"),
    "no attempts": _field("attempts", None),
    "a deadline that is no number": _field("deadline_ms", "soon"),
    "an entry of the books that is none": _books("foreign"),
}

#: What only the way back into the queue takes, half-way through it.
NEEDED_TO_GO_BACK = {
    "no priority": _field("priority", None),
    "a foreign priority": _field("priority", "9"),
}

#: What the scripts do not look at, so that it is found by the one who has claimed.
UNREADABLE = {
    "a log that reaches beyond all tokens": _entry("99999999999-1", ids=b"\x91\x01"),
    "a log with a foreign entry": _entry("0-1", hello="world"),
    "tokens that are none": _entry("1-1", ids=b"\xc1", text="x", **{"from": "0"}),
    "no time of its submission": _field("submitted_ms", None),
    "a time of submission that is none": _field("submitted_ms", "soon"),
}


def spoilt(connection, broker, damage):
    (DAMAGES | UNREADABLE | NEEDED_TO_GO_BACK)[damage](connection, broker.keys)


def assert_ended_alone(broker, connection, *, codes=("damaged",)):
    """The request `b` has failed for good: its readers know, a letter tells, and nothing waits."""
    status = broker.status("b")
    assert status.state is State.FAILED
    (letter,) = broker.dead_letters()
    assert letter.request_id == "b"
    assert letter.reason.startswith(codes)
    newest = connection.xrevrange(broker.keys.output("b"), count=1)[0][1]
    assert newest[b"state"] == b"failed" and b"done" in newest
    for times in (broker.keys.lease, broker.keys.delay, broker.keys.wait):
        assert connection.zscore(times, "b") is None
    assert not connection.hexists(broker.keys.open, "b")
    assert unbalanced(connection, broker) == []
    assert "b" not in [candidate.request_id for candidate in broker.peek(count=9)]


@pytest.mark.parametrize("damage", [*DAMAGES, *UNREADABLE])
def test_a_spoilt_request_costs_its_neighbours_no_claim(broker, connection, damage, caplog):
    broker.submit_many([make_request(id=name) for name in "abc"])
    spoilt(connection, broker, damage)
    entries = broker.peek(count=3, block_seconds=0)
    with caplog.at_level(logging.ERROR, logger="quire.queue.claim.claim"):
        first, second, third = broker.claim(entries)
    assert isinstance(first, Claimed) and isinstance(third, Claimed)
    assert second == NotClaimed("b", NotClaimedReason.DAMAGED, ended=True)
    replies = broker.commit([make_item(one.claim, 0, 1, final=True) for one in (first, third)])
    assert [reply.status.value for reply in replies] == ["ok", "ok"]
    assert_ended_alone(broker, connection, codes=("damaged", "broken_log"))
    if damage in DAMAGES:
        assert "claim of b" in caplog.text


@pytest.mark.parametrize("damage", [*DAMAGES, *NEEDED_TO_GO_BACK])
def test_a_spoilt_request_is_not_in_the_way_of_the_reaper(broker, connection, clockwork, damage):
    for name in "abc":
        submit_and_claim(broker, id=name)
    spoilt(connection, broker, damage)
    for name in "abc":
        clockwork.expire_lease(name)
    # With a limit of one, whoever is first would be so for ever.
    connection.zadd(broker.keys.lease, {"b": 0, b"\xff": -1})
    states = {}
    for _ in range(4):
        states |= {one.request_id: one.state for one in broker.reap(limit=1)}
    assert states.pop("b") in (State.FAILED, State.QUEUED)
    assert states == {"a": State.QUEUED, "c": State.QUEUED}
    if broker.status("b").state is State.QUEUED:
        # Reaping does not look at all that is spoilt; the next claim does.
        claim_until_damaged(broker)
    assert_ended_alone(broker, connection)


def claim_until_damaged(broker):
    answers = broker.claim(broker.peek(count=9, block_seconds=0))
    assert NotClaimed("b", NotClaimedReason.DAMAGED, ended=True) in answers


@pytest.mark.parametrize("damage", ["a record of another type", "a deadline that is no number"])
def test_a_spoilt_request_is_not_in_the_way_of_promotion_or_of_deadlines(
    broker, connection, clockwork, damage
):
    soon = broker.now_ms() + 60_000
    broker.submit_many([make_request(id=name, not_before_ms=soon) for name in "abc"])
    spoilt(connection, broker, damage)
    for name in "abc":
        clockwork.expire_delay(name)
    connection.zadd(broker.keys.delay, {"b": 0})
    promoted = [one for _ in range(3) for one in broker.promote(limit=1)]
    assert promoted[0] == Promoted("b", State.FAILED)
    assert set(promoted[1:]) == {Promoted(name, State.QUEUED) for name in "ac"}
    assert_ended_alone(broker, connection)
    for name in "ac":
        clockwork.expire_queue_time(name)
    expired = [one for _ in range(2) for one in broker.expire(limit=1)]
    assert set(expired) == {Expired(name, State.EXPIRED) for name in "ac"}


@pytest.mark.parametrize("damage", ["a record of another type", "a log of another type"])
def test_a_spoilt_request_is_not_in_the_way_of_the_deadlines_behind_it(broker, connection, damage):
    broker.submit_many([make_request(id=name, deadline_ms=1) for name in "abc"])
    spoilt(connection, broker, damage)
    connection.zadd(broker.keys.wait, {"b": 0})
    expired = [one for _ in range(3) for one in broker.expire(limit=1)]
    assert expired[0] == Expired("b", State.FAILED)
    assert set(expired[1:]) == {Expired(name, State.EXPIRED) for name in "ac"}
    assert_ended_alone(broker, connection)


def test_what_can_be_read_of_a_spoilt_request_is_kept(broker, connection, clockwork):
    request = make_request(id="b")
    broker.submit(request)
    claimed = claim_next(broker)
    broker.commit([make_item(claimed.claim, 0, 3)])
    connection.hset(broker.keys.request("b"), "attempts", "some")
    clockwork.expire_lease("b")
    assert broker.reap() == [Reaped("b", State.FAILED)]
    (letter,) = broker.dead_letters()
    assert letter.original == request.encode()
    chunks, completion = read_all(broker, "b")
    assert [chunk.end for chunk in chunks] == [3]
    assert (completion.state, completion.error.code) == (State.FAILED, "damaged")
    assert broker.commit([make_item(claimed.claim, 3, 4)])[0].status == "fenced"
    assert broker.requeue(letter, keep_tokens=True) is State.QUEUED
    assert claim_next(broker).num_published == 3


@pytest.mark.parametrize("entry", ["foreign", "queued many default", "Queued 9 default"])
def test_what_the_books_held_of_it_is_counted_no_more(broker, connection, entry):
    """Else its tenant, and the tokens that wait, would be nearer to their limits for ever."""
    names = ["g~a", "g~b", "g~c"]
    broker.submit_many([make_request(id=name, tenant=f"t{name[-1]}") for name in names])
    connection.hset(broker.keys.open, "g~b", entry)
    answers = broker.claim(broker.peek(count=2, block_seconds=0))
    assert [type(answer) for answer in answers] == [Claimed, NotClaimed]
    assert unbalanced(connection, broker) == []
    assert not connection.hexists(broker.keys.counts, "tenant:tb")
    assert set(broker.open_members("g")) == {"g~a", "g~c"}


def test_a_request_that_is_forgotten_but_for_spoilt_books_is_struck_out(broker, connection):
    broker.submit_many([make_request(id=name) for name in ("g~a", "g~b")])
    connection.hset(broker.keys.open, "g~a", "foreign")
    connection.delete(broker.keys.request("g~a"), broker.keys.body("g~a"))
    answers = broker.claim(broker.peek(count=2, block_seconds=0))
    assert answers[0] == NotClaimed("g~a", NotClaimedReason.DAMAGED, ended=True)
    assert isinstance(answers[1], Claimed)
    assert broker.peek(count=9) == []
    assert unbalanced(connection, broker) == []


def test_an_end_that_was_told_before_the_books_were_found_spoilt_stands(
    broker, connection, clockwork
):
    claim = submit_and_claim(broker, id="b").claim
    connection.hset(broker.keys.open, "b", "foreign")
    with pytest.raises(ProtocolError):
        broker.commit([make_item(claim, 0, 2, final=True)])
    clockwork.expire_lease("b")
    assert broker.reap() == [Reaped("b", State.FAILED)]
    assert broker.status("b").state is State.COMPLETED
    assert read_all(broker, "b")[1].state is State.COMPLETED
    assert broker.dead_letters() == []
    assert unbalanced(connection, broker) == []


def test_a_message_that_went_away_under_a_claim_is_noticed(broker, connection):
    broker.submit(make_request(id="b"))
    entries = broker.peek(count=1, block_seconds=0)
    owners = [new_owner()]
    broker.claim(entries, owners=owners)
    connection.delete(broker.keys.body("b"))
    # The reply was lost, and the claim is made again.
    answers = broker.claim(entries, owners=owners)
    assert answers == [NotClaimed("b", NotClaimedReason.DAMAGED, ended=True)]
    assert broker.status("b").state is State.FAILED


def test_a_sound_request_is_never_condemned(make_broker, connection):
    """A script that fails for a reason of its own must not end what it fails on."""
    broken = make_broker(sources={"claim": "error('no such thing on this server')"})
    broken.submit_many([make_request(id=name, metadata={"row": 1}) for name in "ab"])
    entries = broken.peek(count=2, block_seconds=0)
    answers = broken.claim(entries)
    assert answers == [NotClaimed(name, NotClaimedReason.DAMAGED) for name in "ab"]
    assert [broken.status(name).state for name in "ab"] == [State.QUEUED] * 2
    sound = make_broker()
    assert all(isinstance(answer, Claimed) for answer in sound.claim(sound.peek(count=9)))


def test_a_foreign_letter_does_not_keep_others_from_being_buried(broker, connection):
    connection.xadd(broker.keys.dead, {"id": "x", "total": "a lot"})
    assert broker.dead_letter(submit_and_claim(broker, id="a").claim, "tired")
    assert [letter.request_id for letter in broker.dead_letters()] == ["a"]


def test_keys_of_the_queue_that_are_spoilt_end_nobody(broker, connection):
    broker.submit(make_request(id="a"))
    kept = connection.dump(broker.keys.counts)
    connection.delete(broker.keys.counts)
    connection.set(broker.keys.counts, "foreign")
    (answer,) = broker.claim(broker.peek(count=1, block_seconds=0))
    assert answer == NotClaimed("a", NotClaimedReason.DAMAGED)
    with pytest.raises(ProtocolError):
        broker.submit(make_request(id="c"))
    connection.delete(broker.keys.counts)
    connection.restore(broker.keys.counts, 0, kept)
    assert broker.status("a").state in (State.QUEUED, State.RUNNING)


def test_a_log_that_has_its_end_needs_no_message(broker, connection):
    broker.submit(make_request(id="b"))
    done = Completion("b", State.COMPLETED, FinishReason.STOP).encode()
    connection.xadd(broker.keys.output("b"), {"done": done, "state": "completed"}, id="0-1")
    connection.expire(broker.keys.output("b"), 600)
    connection.delete(broker.keys.body("b"))
    broker.claim(broker.peek(count=3, block_seconds=0))
    assert broker.status("b").state is State.COMPLETED
