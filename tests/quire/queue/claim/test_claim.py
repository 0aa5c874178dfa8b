"""CLAIM, HEARTBEAT, RELEASE and REAP: who may run a request, for how long, and who is next."""

import pytest

from quire.queue.claim.claim import Claimed, NotClaimed, NotClaimedReason
from quire.queue.lease.lease import HeartbeatReply
from quire.queue.lease.moving import Reaped
from quire.queue.request.arguments import call_on
from quire.queue.request.claims import new_owner
from quire.wire.output import State
from quire.wire.protocol import Priority
from tests.quire.builders import (
    claim_next,
    make_item,
    make_request,
    read_all,
    read_and_claim,
    submit_and_claim,
    token_at,
    token_ids_of,
)
from tests.quire.waiting import eventually


def test_a_claim_gives_the_body_and_a_fence_of_its_own(broker):
    request = make_request()
    broker.submit(request)
    claimed = claim_next(broker)
    assert claimed.request_bytes == request.encode()
    assert (claimed.claim.epoch, claimed.attempts, claimed.published) == (1, 1, ())
    assert len(bytes.fromhex(claimed.claim.owner)) == 16
    assert broker.status(request.id).state is State.RUNNING


def test_a_claimed_entry_is_gone_from_the_stream_and_from_the_pending_list(broker, connection):
    submit_and_claim(broker)
    stream = broker.keys.ingress(Priority.NORMAL)
    assert connection.xlen(stream) == 0
    assert connection.xpending(stream, "workers")["pending"] == 0


def test_of_two_workers_with_the_same_entry_one_gets_the_request(broker):
    broker.submit(make_request())
    entries = broker.peek(count=1, block_seconds=0)
    first, second = broker.claim(entries * 2)
    assert isinstance(first, Claimed)
    assert second == NotClaimed(first.claim.request_id, NotClaimedReason.RUNNING)
    assert broker.heartbeat([first.claim]) == [HeartbeatReply(alive=True, cancel_requested=False)]


def test_a_claim_whose_reply_was_lost_is_answered_again(broker):
    broker.submit_many([make_request(), make_request()])
    entries = broker.peek(count=2, block_seconds=0)
    owners = [new_owner() for _ in entries]
    first, again = (broker.claim(entries, owners=owners) for _ in range(2))
    assert again == first and [answer.claim.owner for answer in first] == owners


def test_a_claim_that_is_made_anew_is_another_one(broker):
    broker.submit(make_request())
    entries = broker.peek(count=1, block_seconds=0)
    (first,), (again,) = broker.claim(entries), broker.claim(entries)
    assert isinstance(first, Claimed) and again.reason is NotClaimedReason.RUNNING


def test_entries_of_unknown_requests_are_used_up(broker, connection):
    stream = broker.keys.ingress(Priority.NORMAL)
    connection.xadd(stream, {"id": "ghost"})
    connection.xadd(stream, {"something": "else"})

    def are_used_up():
        # On a busy machine the time of a call may be over before it comes to them.
        assert broker.peek(count=2, block_seconds=0.01) == []
        return connection.xlen(stream) == 0

    eventually(are_used_up)


def test_the_engine_of_the_first_claim_is_remembered(broker, clockwork):
    broker.submit(make_request(id="a"))
    assert claim_next(broker, fingerprint="one").fingerprint is None
    clockwork.expire_lease("a")
    broker.reap()
    assert claim_next(broker, fingerprint="two").fingerprint == "one"
    assert broker.status("a").fingerprint == "one"


@pytest.mark.parametrize("late", ["deadline", "queue_timeout"])
def test_a_request_whose_time_is_over_ends_at_the_claim(broker, clockwork, late):
    deadline = 1 if late == "deadline" else None
    broker.submit(make_request(id="a", deadline_ms=deadline))
    if late == "queue_timeout":
        clockwork.expire_queue_time("a")
    assert read_and_claim(broker) == NotClaimed("a", NotClaimedReason.EXPIRED, ended=True)
    _, completion = read_all(broker, "a")
    code = "deadline_exceeded" if late == "deadline" else "queue_timeout"
    assert (completion.state, completion.error.code) == (State.EXPIRED, code)


def test_an_expired_lease_queues_the_request_again_with_its_tokens(broker, clockwork):
    first = submit_and_claim(broker, id="a", priority="critical")
    broker.commit([make_item(first.claim, 0, 3)])
    clockwork.expire_lease("a")
    assert broker.reap() == [Reaped("a", State.QUEUED)]
    second = claim_next(broker)
    assert token_ids_of(list(second.published)) == [token_at(index) for index in range(3)]
    assert second.num_published == 3
    assert (second.claim.epoch, second.attempts) == (3, 1)
    broker.commit([make_item(second.claim, 3, 5, final=True)])
    _, completion = read_all(broker, "a")
    assert (completion.attempts, completion.resumes) == (1, 1)
    assert completion.usage.completion_tokens == 5


def test_a_lease_that_was_renewed_is_not_reaped(broker, clockwork):
    claimed = submit_and_claim(broker, id="a")
    clockwork.expire_lease("a")
    assert broker.heartbeat([claimed.claim])[0].alive
    assert broker.reap() == []


def test_publishing_alone_renews_no_lease(broker, clockwork):
    claimed = submit_and_claim(broker, id="a")
    clockwork.expire_lease("a")
    broker.commit([make_item(claimed.claim, 0, 1)])
    assert [reaped.request_id for reaped in broker.reap()] == ["a"]


def test_a_lease_renewed_between_the_look_and_the_reaping_is_left_alone(
    broker, clockwork, monkeypatch
):
    claimed = submit_and_claim(broker, id="a")
    clockwork.expire_lease("a")

    def renew_and_build(keys, request_ids):
        assert request_ids == ["a"], "the reaper has seen the expired lease"
        assert broker.heartbeat([claimed.claim])[0].alive
        return call_on(keys, request_ids)

    monkeypatch.setattr("quire.queue.lease.moving.call_on", renew_and_build)
    assert broker.reap() == []
    assert broker.status("a").state is State.RUNNING


def test_two_reapers_queue_a_request_once(broker, clockwork):
    submit_and_claim(broker, id="a")
    clockwork.expire_lease("a")
    assert (len(broker.reap()), len(broker.reap())) == (1, 0)
    assert sum(broker.queue_depth().values()) == 1


def test_a_lease_without_a_running_request_is_removed(broker, connection):
    connection.zadd(broker.keys.lease, {"ghost": 1})
    assert broker.reap() == []
    assert connection.zcard(broker.keys.lease) == 0


def test_reaping_takes_no_more_than_its_limit_oldest_first(broker, connection):
    broker.submit_many([make_request(id=name) for name in "abc"])
    broker.claim(broker.peek(count=3, block_seconds=0))
    connection.zadd(broker.keys.lease, {"a": 3, "b": 1, "c": 2})
    assert [reaped.request_id for reaped in broker.reap(limit=2)] == ["b", "c"]


def test_spent_attempts_end_in_a_dead_letter_and_a_failed_record(make_broker, connection):
    broker = make_broker(max_attempts=2)
    request = make_request(id="a")
    broker.submit(request)
    for expected in (State.QUEUED, State.FAILED):
        claim_next(broker)
        connection.zadd(broker.keys.lease, {"a": 1})
        assert broker.reap() == [Reaped("a", expected)]
    _, completion = read_all(broker, "a")
    assert (completion.error.code, completion.attempts) == ("attempts_spent", 2)
    (letter,) = broker.dead_letters()
    assert (letter.request_id, letter.reason, letter.attempts) == ("a", "attempts_spent", 2)
    assert letter.original == request.encode()


def test_a_cancelled_request_whose_worker_died_ends_at_the_reaping(broker, clockwork):
    submit_and_claim(broker, id="a")
    broker.cancel("a")
    clockwork.expire_lease("a")
    assert broker.reap() == [Reaped("a", State.CANCELLED)]
    assert read_all(broker, "a")[1].state is State.CANCELLED


def test_a_released_request_is_queued_again_and_the_attempt_does_not_count(broker):
    first = submit_and_claim(broker, id="a")
    broker.commit([make_item(first.claim, 0, 2)])
    assert broker.release([first.claim]) == [True]
    assert broker.release([first.claim]) == [True], "a lost reply must not look like a lost claim"
    assert sum(broker.queue_depth().values()) == 1
    second = claim_next(broker)
    assert (second.attempts, second.num_published) == (1, 2)
    assert broker.release([first.claim]) == [True]
    assert broker.status("a").state is State.RUNNING


def test_the_moment_of_the_first_token_is_that_of_the_first_claim(broker, connection):
    first = submit_and_claim(broker, id="a")
    broker.commit([make_item(first.claim, 0, 2)])
    record = connection.hgetall(broker.keys.request("a"))
    an_hour_later = int(record[b"submitted_ms"]) + 3_600_000
    connection.hset(broker.keys.request("a"), "first_token_ms", an_hour_later)
    broker.release([first.claim])
    second = claim_next(broker)
    broker.commit([make_item(second.claim, 2, 3)])
    broker.commit([make_item(second.claim, 3, 4, final=True)])
    assert read_all(broker, "a")[1].timing.first_token_seconds == 3600


def test_a_claim_that_is_lost_cannot_be_released(broker, clockwork):
    first = submit_and_claim(broker, id="a")
    clockwork.expire_lease("a")
    broker.reap()
    assert broker.release([first.claim]) == [False]
    assert sum(broker.queue_depth().values()) == 1


def test_a_request_that_has_ended_is_held_by_nobody(broker, connection):
    """Its record keeps the epoch and the owner of the claim that ended it."""
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 2, final=True)])
    assert not broker.heartbeat([claimed.claim])[0].alive
    assert broker.release([claimed.claim]) == [False]
    assert broker.status("a").state is State.COMPLETED
    assert connection.zcard(broker.keys.lease) == 0


def test_releasing_without_end_never_spends_the_attempts(make_broker):
    broker = make_broker(max_attempts=1)
    broker.submit(make_request())
    for _ in range(4):
        assert broker.release([claim_next(broker).claim]) == [True]


def test_a_released_request_that_a_caller_cancelled_ends(broker):
    claimed = submit_and_claim(broker, id="a")
    broker.cancel("a")
    assert broker.release([claimed.claim]) == [True]
    assert broker.status("a").state is State.CANCELLED


def test_a_heartbeat_of_a_lost_claim_says_so_and_renews_nothing(broker, clockwork):
    first = submit_and_claim(broker, id="a")
    clockwork.expire_lease("a")
    broker.reap()
    assert not broker.heartbeat([first.claim])[0].alive
    assert clockwork.connection.zcard(broker.keys.lease) == 0


def test_a_request_that_can_never_run_becomes_a_dead_letter_with_its_bytes(broker, connection):
    claimed = submit_and_claim(broker, id="a")
    connection.set(broker.keys.body("a"), b"\xff\x00junk", keepttl=True)
    assert broker.dead_letter(claimed.claim, "not a message")
    assert broker.dead_letter(claimed.claim, "not a message"), "repeating is harmless"
    (letter,) = broker.dead_letters()
    assert (letter.reason, letter.original) == ("not a message", b"\xff\x00junk")
    _, completion = read_all(broker, "a")
    assert (completion.state, completion.error.code) == (State.FAILED, "undecodable")


def test_a_lost_claim_cannot_bury_the_request(broker, clockwork):
    first = submit_and_claim(broker, id="a")
    clockwork.expire_lease("a")
    broker.reap()
    claim_next(broker)
    assert not broker.dead_letter(first.claim, "not a message")
    assert broker.dead_letters() == []


def test_a_running_request_outlives_its_first_expiry(make_broker, connection):
    broker = make_broker(max_queue_seconds=1000, retention_seconds=100)
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 1)])
    for key in broker.keys.of_request("a"):
        connection.pexpire(key, 2000)
    broker.heartbeat([claimed.claim])
    assert all(connection.pttl(key) > 500_000 for key in broker.keys.of_request("a"))


def test_a_finished_request_is_kept_for_the_retention(make_broker, connection):
    broker = make_broker(retention_seconds=100)
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 1, final=True)])
    record, body, output = broker.keys.of_request("a")
    assert connection.exists(body) == 0
    assert all(50_000 < connection.pttl(key) <= 100_000 for key in (record, output))
