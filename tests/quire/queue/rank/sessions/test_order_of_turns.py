"""The turns of a session run one after the other, and hold up nobody else."""

import pytest

from quire.errors import InvalidRequest
from quire.queue.claim.claim import NotClaimedReason
from quire.queue.claim.ingress import Candidate
from quire.queue.lease.lease import BackOff
from quire.queue.repair.restore import Lost
from quire.queue.submit.routing import placed, shard_of
from quire.wire.arguments import build_request
from quire.wire.output import ErrorInfo, State
from quire.wire.protocol import Priority
from tests.quire.builders import (
    Snapshot,
    claim_next,
    make_item,
    make_request,
    read_all,
    read_and_claim,
    token_ids_of,
)


def submit(broker, *names, session="s", **fields):
    for name in names:
        broker.submit(make_request(id=name, session_id=session, **fields))


def waiting(broker):
    """The requests that a worker finds, the first to be claimed first."""
    return [candidate.request_id for candidate in broker.peek(count=100)]


def finish(broker, claimed):
    start = claimed.num_published
    (reply,) = broker.commit([make_item(claimed.claim, start, start + 1, final=True)])
    assert reply.status == "ok"


def run_next(broker):
    """Runs the request that is due next to its end, and returns its id."""
    claimed = claim_next(broker)
    finish(broker, claimed)
    return claimed.claim.request_id


def test_the_turns_of_a_session_run_in_order_and_one_at_a_time(broker):
    submit(broker, "a", "b", "c")
    assert waiting(broker) == ["a"]
    first = claim_next(broker)
    assert waiting(broker) == []
    broker.commit([make_item(first.claim, 0, 2)])
    assert waiting(broker) == []
    broker.commit([make_item(first.claim, 2, 3, final=True)])
    assert waiting(broker) == ["b"]
    assert [run_next(broker), run_next(broker)] == ["b", "c"]
    assert waiting(broker) == []


def test_a_parked_turn_holds_up_no_other_request(broker, connection):
    submit(broker, "a", "b", "c")
    submit(broker, "other", session="t")
    broker.submit(make_request(id="plain"))
    # Sessions of two tenants are two sessions, whatever their name.
    submit(broker, "theirs", tenant="them")
    assert waiting(broker) == ["a", "other", "plain", "theirs"]
    # A worker that waits, and an autoscaler, see those that can run.
    assert connection.xlen(broker.keys.ingress(Priority.NORMAL)) == 4


def test_the_names_of_sessions_may_begin_alike(broker):
    submit(broker, "a", session="s")
    submit(broker, "b", session="s.1")
    submit(broker, "c", session="s:1")
    submit(broker, "d", session="s-")
    assert waiting(broker) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("session", ["a b", "", "ä", "x" * 129, "a~b", "a\nb", 7])
def test_a_session_has_a_name_that_keys_can_hold(session):
    with pytest.raises(InvalidRequest, match="session_id"):
        build_request({"prompt": [1], "session_id": session}, tenant="t", now_ms=None)


def end_by_cancel(broker, clockwork, connection):
    broker.cancel("a")


def end_by_deadline(broker, clockwork, connection):
    clockwork.expire_queue_time("a")
    assert [one.state for one in broker.expire()] == [State.EXPIRED]


def end_by_failure(broker, clockwork, connection):
    broker.fail(claim_next(broker).claim, ErrorInfo("engine_error", "it failed"))


def end_by_dead_letter(broker, clockwork, connection):
    assert broker.dead_letter(claim_next(broker).claim, "undecodable")


def end_by_lost_workers(broker, clockwork, connection):
    for _ in range(5):
        assert claim_next(broker).claim.request_id == "a"
        clockwork.expire_lease("a")
        broker.reap()


def end_by_expired_keys(broker, clockwork, connection):
    connection.delete(*broker.keys.of_request("a"))
    assert read_and_claim(broker).reason == NotClaimedReason.MISSING


def end_by_damage(broker, clockwork, connection):
    connection.delete(broker.keys.body("a"))
    assert read_and_claim(broker).reason == NotClaimedReason.DAMAGED


def end_while_running(broker, clockwork, connection):
    claimed = claim_next(broker)
    broker.cancel("a")
    assert waiting(broker) == []
    broker.release([claimed.claim])


@pytest.mark.parametrize(
    "end",
    [
        end_by_cancel, end_by_deadline, end_by_failure, end_by_dead_letter, end_by_lost_workers,
        end_by_expired_keys, end_by_damage, end_while_running,
    ],
)  # fmt: skip
def test_whatever_ends_a_turn_lets_the_next_one_run(broker, clockwork, connection, end):
    submit(broker, "a", "b", "c")
    end(broker, clockwork, connection)
    assert waiting(broker) == ["b"]
    assert [run_next(broker), run_next(broker)] == ["b", "c"]


def test_a_parked_turn_may_be_cancelled_and_the_others_keep_their_order(broker):
    submit(broker, "a", "b", "c", "d")
    assert broker.cancel("b") == State.CANCELLED
    assert broker.cancel("d") == State.CANCELLED
    assert waiting(broker) == ["a"]
    assert [run_next(broker), run_next(broker)] == ["a", "c"]
    assert waiting(broker) == []


def test_a_parked_turn_expires_like_any_other(broker, clockwork, connection):
    submit(broker, "a", "b", "c")
    clockwork.expire_queue_time("b")
    assert [(one.request_id, one.state) for one in broker.expire()] == [("b", State.EXPIRED)]
    _, completion = read_all(broker, "b")
    assert completion.error.code == "queue_timeout"
    assert [run_next(broker), run_next(broker)] == ["a", "c"]


def test_a_turn_for_later_holds_back_those_after_it(broker, clockwork):
    broker.submit(make_request(id="a", session_id="s", not_before_ms=broker.now_ms() + 100_000))
    submit(broker, "b")
    assert waiting(broker) == []
    clockwork.expire_delay("a")
    broker.promote()
    assert waiting(broker) == ["a"]
    assert [run_next(broker), run_next(broker)] == ["a", "b"]


def test_a_turn_that_is_due_while_an_earlier_one_is_open_is_parked(broker, clockwork):
    submit(broker, "a")
    broker.submit(make_request(id="b", session_id="s", not_before_ms=broker.now_ms() + 100_000))
    clockwork.expire_delay("b")
    broker.promote()
    assert (waiting(broker), broker.status("b").state) == (["a"], State.QUEUED)
    assert [run_next(broker), run_next(broker)] == ["a", "b"]


def test_a_turn_that_is_tried_again_keeps_its_place_before_the_next(broker, clockwork):
    submit(broker, "a", "b")
    broker.fail(claim_next(broker).claim, ErrorInfo("e", "once"), retry=BackOff(9.0, 9.0))
    assert waiting(broker) == []
    clockwork.expire_delay("a")
    broker.promote()
    assert [run_next(broker), run_next(broker)] == ["a", "b"]


def test_the_next_worker_continues_a_turn_before_any_later_one(broker, clockwork):
    submit(broker, "a", "b")
    first = claim_next(broker)
    broker.commit([make_item(first.claim, 0, 3)])
    clockwork.expire_lease("a")
    broker.reap()
    assert waiting(broker) == ["a"]
    heir = claim_next(broker)
    assert heir.num_published == 3
    finish(broker, heir)
    # A commit that arrives too late frees nothing twice.
    assert broker.commit([make_item(first.claim, 3, 4, final=True)])[0].status == "fenced"
    assert run_next(broker) == "b"
    chunks, _ = read_all(broker, "a")
    assert len(token_ids_of(chunks)) == 4


def test_a_turn_is_ranked_by_the_policy_when_it_is_freed(broker):
    submit(broker, "a", "b")
    broker.submit(make_request(id="plain"))
    submit(broker, "c", priority=Priority.HIGH)
    assert [run_next(broker), waiting(broker)] == ["a", ["b", "plain"]]
    # `b` was submitted before `plain`, and a class counts when the turn may run.
    assert [run_next(broker), waiting(broker)] == ["b", ["c", "plain"]]
    assert [run_next(broker), run_next(broker)] == ["c", "plain"]


def test_a_claim_of_a_parked_turn_is_refused(broker):
    submit(broker, "a", "b")
    (answer,) = broker.claim([Candidate("b", Priority.NORMAL, 0)])
    assert (answer.reason, answer.ended) == (NotClaimedReason.EARLIER_TURN, False)
    assert [run_next(broker), run_next(broker)] == ["a", "b"]


def test_a_dead_letter_that_is_queued_again_is_the_last_turn(broker):
    submit(broker, "a", "b", "c")
    broker.dead_letter(claim_next(broker).claim, "undecodable")
    second = claim_next(broker)
    (letter,) = broker.dead_letters()
    assert broker.requeue(letter, keep_tokens=False) == State.QUEUED
    assert waiting(broker) == []
    finish(broker, second)
    assert [run_next(broker), run_next(broker)] == ["c", "a"]


def test_a_dead_letter_joins_its_session_when_its_record_is_gone(broker, connection):
    submit(broker, "a", "b")
    broker.dead_letter(claim_next(broker).claim, "undecodable")
    connection.delete(*broker.keys.of_request("a"))
    (letter,) = broker.dead_letters()
    broker.requeue(letter, keep_tokens=False)
    assert [run_next(broker), run_next(broker)] == ["b", "a"]


def test_a_submit_of_a_parked_turn_again_does_not_free_it(broker):
    submit(broker, "a", "b")
    submit(broker, "b", "a")
    assert waiting(broker) == ["a"]
    assert [run_next(broker), run_next(broker)] == ["a", "b"]


def test_a_server_that_forgets_the_end_of_a_turn_runs_both_again(broker, connection):
    submit(broker, "a", "b")
    before = Snapshot(connection, broker)
    assert run_next(broker) == "a"
    assert waiting(broker) == ["b"]
    before.restore()
    assert waiting(broker) == ["a"]
    assert [run_next(broker), run_next(broker)] == ["a", "b"]


def test_a_server_that_forgets_a_parked_turn_frees_nothing(broker, connection):
    submit(broker, "a")
    before = Snapshot(connection, broker)
    submit(broker, "b")
    before.restore()
    assert run_next(broker) == "a"
    assert waiting(broker) == []
    submit(broker, "b")
    assert run_next(broker) == "b"


@pytest.mark.parametrize("lost", ["turn", "turns", "turn turns"])
def test_what_a_server_loses_of_sessions_is_restored(broker, connection, lost):
    submit(broker, "a", "b", "c")
    for name in lost.split():
        connection.delete(getattr(broker.keys, name))
    restored = {one.request_id: one.lost for one in broker.restore(is_at_once=True)}
    assert restored.keys() >= {"a", "c"}
    assert set(restored.values()) == {Lost.ENTRY}
    broker.restore(is_at_once=True)
    assert waiting(broker) == ["a"]
    assert [run_next(broker) for _ in range(3)] == ["a", "b", "c"]


def test_a_turn_that_ends_after_its_entry_was_lost_leaves_nothing_behind(broker, connection):
    submit(broker, "a", "b")
    submit(broker, "c", session="other")
    first, other = claim_next(broker), claim_next(broker)
    connection.delete(broker.keys.turn)
    finish(broker, first)
    finish(broker, other)
    (left,) = connection.zrange(broker.keys.turns, 0, -1)
    assert left.endswith(b" b")
    broker.restore(is_at_once=True)
    assert run_next(broker) == "b"
    assert connection.exists(broker.keys.turn, broker.keys.turns) == 0


def test_a_turn_that_ends_after_its_entry_was_lost_lets_the_next_one_run(broker, connection):
    submit(broker, "a", "b")
    first = claim_next(broker)
    connection.hdel(broker.keys.turn, "a")
    finish(broker, first)
    assert run_next(broker) == "b"
    assert connection.exists(broker.keys.turn, broker.keys.turns) == 0


def test_a_turn_whose_predecessor_ended_without_a_trace_is_restored(broker, connection):
    """As when a torn file has its end, and not that it left its session."""
    submit(broker, "a", "b")
    entry = connection.hget(broker.keys.turn, "a")
    member = connection.zrange(broker.keys.turns, 0, 0)[0]
    connection.hdel(broker.keys.turn, "a")
    connection.hdel(broker.keys.request("a"), "session")
    assert run_next(broker) == "a"
    connection.hset(broker.keys.turn, "a", entry)
    connection.zadd(broker.keys.turns, {member: 0})
    assert waiting(broker) == []
    assert {one.request_id for one in broker.restore(is_at_once=True)} == {"b"}
    assert run_next(broker) == "b"
    assert connection.exists(broker.keys.turn, broker.keys.turns) == 0


def test_the_turns_of_a_session_share_a_shard():
    requests = [
        placed(make_request(session_id="s"), num_shards=7, group=group)
        for group in (None, "g")
        for _ in range(20)
    ]
    assert len({request.id for request in requests}) == 40
    (shard,) = {shard_of(request.id, 7) for request in requests}
    # A repeated call finds the request in the same place.
    assert all(placed(request, num_shards=7) == request for request in requests)
    keyed = {placed(make_request(session_id="s", idempotency_key="k"), num_shards=7).id
        for _ in range(3)}  # fmt: skip
    assert len(keyed) == 1
    assert shard_of(keyed.pop(), 7) == shard
    elsewhere = next(str(n) for n in range(99) if shard_of(str(n), 7) != shard)
    with pytest.raises(InvalidRequest, match="session_id"):
        placed(make_request(id=elsewhere, session_id="s"), num_shards=7)
