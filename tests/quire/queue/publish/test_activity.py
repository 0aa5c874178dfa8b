"""What a claimed request does in its worker: told by the claim's own worker, and by it alone."""

from dataclasses import replace
from functools import partial

import pytest

from quire.queue.publish.commit import CommitItem, CommitStatus
from quire.queue.scripts import load_source
from quire.records import Activity
from quire.wire.output import State
from tests.quire.builders import (
    Snapshot,
    claim_next,
    make_item,
    make_request,
    read_all,
    submit_and_claim,
    token_at,
    token_ids_of,
)
from tests.quire.conftest import queue_of_its_own

WAITING, PREFILLING = Activity.WAITING, Activity.PREFILLING
DECODING, PREEMPTED = Activity.DECODING, Activity.PREEMPTED


def tell(broker, claim, activity, *, published=0):
    """The reply to an item that only tells what the request does."""
    (reply,) = broker.commit([CommitItem(claim, published, (), "", activity=activity)])
    return reply


def activity_of(broker, request_id="a"):
    return broker.status(request_id).activity


def test_a_request_has_an_activity_from_its_claim_to_its_end(broker):
    broker.submit(make_request(id="a"))
    assert activity_of(broker) is None
    claim = claim_next(broker).claim
    assert activity_of(broker) is WAITING
    for activity in (PREFILLING, PREEMPTED, PREFILLING, DECODING):
        assert tell(broker, claim, activity).status is CommitStatus.OK
        status = broker.status("a")
        assert (status.state, status.activity) == (State.RUNNING, activity)
    broker.commit([make_item(claim, 0, 2, final=True)])
    status = broker.status("a")
    assert (status.state, status.activity) == (State.COMPLETED, None)


def test_only_two_activities_compute():
    assert [one for one in Activity if one.is_computing] == [PREFILLING, DECODING]


def test_tokens_and_activity_are_told_in_one_item_and_extend_adds_the_rest(broker):
    claim = submit_and_claim(broker, id="a").claim
    tell(broker, claim, PREFILLING)
    broker.commit([replace(make_item(claim, 0, 2), activity=DECODING)])
    broker.commit([make_item(claim, 2, 3)])
    assert (activity_of(broker), broker.status("a").published) == (DECODING, 3)
    tell(broker, claim, PREEMPTED, published=3)
    assert (activity_of(broker), broker.status("a").published) == (PREEMPTED, 3)
    broker.commit([replace(make_item(claim, 3, 5), activity=DECODING)])
    broker.commit([make_item(claim, 5, 6, final=True)])
    chunks, _ = read_all(broker, "a")
    assert token_ids_of(chunks) == [token_at(index) for index in range(6)]


def test_an_activity_without_tokens_leaves_the_log_position_as_it_is(broker, connection):
    claim = submit_and_claim(broker, id="a").claim
    tell(broker, claim, PREFILLING)
    assert not connection.exists(broker.keys.log_positions, broker.keys.output("a"))
    broker.commit([make_item(claim, 0, 2)])
    before = connection.hgetall(broker.keys.log_positions)
    tell(broker, claim, PREEMPTED, published=2)
    assert connection.hgetall(broker.keys.log_positions) == before
    # So the first tokens are still judged by COMMIT, which records when they came.
    assert connection.hexists(broker.keys.request("a"), "first_token_ms")


def test_a_worker_that_tells_nothing_is_known_by_its_tokens(broker):
    claim = submit_and_claim(broker, id="a").claim
    broker.commit([make_item(claim, 0, 2)])
    assert activity_of(broker) is DECODING
    broker.release([claim])
    assert activity_of(broker) is None
    heir = claim_next(broker).claim
    assert activity_of(broker) is WAITING
    broker.commit([make_item(heir, 2, 3)])
    assert activity_of(broker) is DECODING


def test_what_a_lost_claim_has_told_does_not_count_for_the_next_one(broker, clockwork):
    zombie = submit_and_claim(broker, id="a").claim
    tell(broker, zombie, DECODING)
    clockwork.expire_lease("a")
    broker.reap()
    assert tell(broker, zombie, DECODING).status is CommitStatus.FENCED
    heir = claim_next(broker).claim
    assert activity_of(broker) is WAITING
    tell(broker, heir, PREFILLING)
    assert tell(broker, zombie, PREEMPTED).status is CommitStatus.FENCED
    assert activity_of(broker) is PREFILLING


def test_a_stranger_with_the_same_epoch_is_fenced(broker):
    claim = submit_and_claim(broker, id="a").claim
    stranger = replace(claim, owner="00" * 16)
    assert tell(broker, stranger, PREEMPTED).status is CommitStatus.FENCED
    assert activity_of(broker) is WAITING


def test_an_activity_behind_a_lost_tail_asks_for_the_tokens_first(broker, clockwork):
    claim = submit_and_claim(broker, id="a").claim
    snapshot = Snapshot(clockwork.connection, broker)
    broker.commit([make_item(claim, 0, 3)])
    snapshot.restore()
    reply = tell(broker, claim, PREEMPTED, published=3)
    assert (reply.status, reply.published) == (CommitStatus.REWIND, 0)
    assert activity_of(broker) is WAITING


def test_a_cancellation_is_heard_with_it(broker):
    claim = submit_and_claim(broker, id="a").claim
    broker.cancel("a")
    assert tell(broker, claim, PREFILLING).cancel_requested


def test_a_word_of_a_later_version_is_no_damage(broker, connection):
    claim = submit_and_claim(broker, id="a").claim
    connection.hset(broker.keys.request("a"), "activity", f"dreaming {claim.owner}")
    assert activity_of(broker) is WAITING


def test_nothing_of_it_is_left_after_the_end(broker, connection):
    claim = submit_and_claim(broker, id="a").claim
    tell(broker, claim, PREFILLING)
    assert connection.hexists(broker.keys.request("a"), "activity")
    broker.commit([make_item(claim, 0, 1, final=True)])
    assert not connection.hexists(broker.keys.request("a"), "activity")


def what_stays_told(make) -> Activity | None:
    """What is told of a request after its heir and then a zombie have told something."""
    broker = make()
    zombie = submit_and_claim(broker, id="a").claim
    tell(broker, zombie, DECODING)
    broker.release([zombie])
    tell(broker, claim_next(broker).claim, PREFILLING)
    tell(broker, zombie, PREEMPTED)
    return activity_of(broker)


@pytest.mark.real_redis
def test_without_the_fence_a_zombie_makes_it_wrong(real_connection):
    fence = "return fields.state == 'running' and fields.epoch == epoch and fields.owner == owner"
    source = load_source("commit")
    assert fence in source
    broken = {"commit": source.replace(fence, "return fields.state == 'running'")}
    with queue_of_its_own(real_connection) as make:
        assert what_stays_told(make) is PREFILLING
    with queue_of_its_own(real_connection) as make:
        assert what_stays_told(partial(make, sources=broken)) is not PREFILLING
