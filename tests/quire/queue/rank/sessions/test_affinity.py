"""A turn is kept for the worker that had the last turn of its session, for a bounded time."""

import pytest

from quire.queue.claim.claim import Claimed, NotClaimedReason
from tests.quire.builders import make_item, make_request, pass_moment

#: No test lasts as long.
LONG_SECONDS = 60.0


@pytest.fixture
def claim(broker):
    """Claims the request that is due next, for a worker."""

    def for_worker(worker, *, seconds=LONG_SECONDS):
        (answer,) = broker.claim(broker.peek(count=1), worker=worker, affinity_seconds=seconds)
        return answer

    return for_worker


def beat(broker, *workers, state="ready"):
    for worker in workers:
        broker.beat_worker(worker, state, {})


@pytest.fixture
def served(broker, claim):
    """Worker w-1 had the first turn of a session, and the second one waits."""
    beat(broker, "w-1", "w-2")
    broker.submit_many([make_request(id=name, session_id="s") for name in "ab"])
    claimed = claim("w-1")
    assert claimed.claim.request_id == "a"
    broker.commit([make_item(claimed.claim, 0, 1, final=True)])


def test_the_worker_of_the_last_turn_gets_the_next_one(served, claim):
    assert claim("w-2").reason == NotClaimedReason.KEPT
    assert claim("w-1").claim.request_id == "b"


def test_a_turn_is_kept_for_the_worker_of_the_last_one_and_for_a_time_only(
    served, claim, broker, connection
):
    kept = claim("w-2")
    assert kept.reason == NotClaimedReason.KEPT
    assert 0 < kept.retry_seconds <= LONG_SECONDS
    # A second look does not begin the time anew.
    pass_moment(broker)
    assert claim("w-2").retry_seconds < kept.retry_seconds
    connection.hincrby(broker.keys.request("b"), "kept_ms", -int(LONG_SECONDS * 1000))
    assert claim("w-2").claim.request_id == "b"


def test_the_time_begins_when_another_worker_could_take_the_turn(served, claim, broker):
    """Not when it is queued: in a long queue the time would be over before a worker looks."""
    pass_moment(broker, broker.now_ms() + 50)
    kept = claim("w-2", seconds=0.05)
    assert kept.reason == NotClaimedReason.KEPT
    pass_moment(broker, broker.now_ms() + 60)
    assert claim("w-2", seconds=0.05).claim.request_id == "b"


def test_a_turn_that_is_kept_holds_up_no_other_request(served, claim, broker):
    broker.submit(make_request(id="plain"))
    answers = broker.claim(broker.peek(count=2), worker="w-2", affinity_seconds=LONG_SECONDS)
    assert answers[0].reason == NotClaimedReason.KEPT
    assert answers[1].claim.request_id == "plain"


@pytest.mark.parametrize("state", ["draining", "stopped", "failed"])
def test_nothing_is_kept_for_a_worker_that_leaves(served, claim, broker, state):
    beat(broker, "w-1", state=state)
    assert claim("w-2").claim.request_id == "b"


def test_nothing_is_kept_for_a_worker_that_was_asked_to_drain(served, claim, broker, connection):
    connection.hset(broker.keys.control, "drain:w-1", broker.now_ms())
    assert claim("w-2").claim.request_id == "b"


def test_nothing_is_kept_for_a_worker_that_is_dead(served, claim, broker, connection):
    long_ago = broker.now_ms() - int(2000 * broker.lease_seconds)
    connection.hset(broker.keys.workers, "w-1", f"{long_ago} ready x")
    assert claim("w-2").claim.request_id == "b"


def test_nothing_is_kept_for_a_worker_that_the_registry_has_lost(served, claim, broker, connection):
    connection.delete(broker.keys.workers)
    assert claim("w-2").claim.request_id == "b"


def test_a_worker_may_take_every_turn_at_once(served, claim):
    assert claim("w-2", seconds=0).claim.request_id == "b"


def test_a_caller_that_names_no_worker_gets_every_turn(served, broker):
    (answer,) = broker.claim(broker.peek(count=1))
    assert isinstance(answer, Claimed)


def test_a_turn_that_comes_back_is_kept_for_nobody(served, claim, broker):
    broker.release([claim("w-1").claim])
    assert claim("w-2").claim.request_id == "b"


def test_the_last_worker_of_a_session_is_the_one_that_had_its_last_turn(served, claim, broker):
    second = claim("w-2", seconds=0)
    broker.commit([make_item(second.claim, 0, 1, final=True)])
    broker.submit(make_request(id="c", session_id="s"))
    assert claim("w-1").reason == NotClaimedReason.KEPT
    assert claim("w-2").claim.request_id == "c"


def test_a_session_of_another_tenant_has_a_worker_of_its_own(served, claim, broker):
    broker.cancel("b")
    broker.submit(make_request(id="theirs", session_id="s", tenant="them"))
    assert claim("w-2").claim.request_id == "theirs"


def test_two_sessions_with_the_same_number_are_two_sessions(served, claim, broker, connection):
    (number,) = connection.hkeys(broker.keys.served)
    connection.hset(broker.keys.served, number, "default:other w-1")
    assert claim("w-2").claim.request_id == "b"


def test_what_is_remembered_of_sessions_expires(served, broker, connection):
    assert 0 < connection.pttl(broker.keys.served) <= 86_400_000
