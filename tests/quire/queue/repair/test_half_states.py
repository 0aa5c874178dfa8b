"""What a torn append-only file can leave: the entry in the log, and nothing that came after it.

The half states are built by hand: the record is what it was before a commit, the log has its entry.
"""

import pytest

from quire.queue.broker import Broker
from quire.queue.claim.claim import NotClaimed, NotClaimedReason
from quire.queue.publish.commit import CommitStatus
from quire.wire.output import State
from tests.quire.builders import (
    Snapshot,
    claim_next,
    make_item,
    read_all,
    read_and_claim,
    submit_and_claim,
    token_at,
    token_ids_of,
)


class Torn:
    """`commit` takes effect by half: the log gets its entries, all else is as it was before."""

    def __init__(self, broker, connection):
        self.broker, self.connection = broker, connection

    def commit(self, *items, entries=None):
        (request_id,) = {item.claim.request_id for item in items}
        stream = self.broker.keys.output(request_id)
        before = Snapshot(self.connection, self.broker)
        known = {entry_id for entry_id, _ in self.connection.xrange(stream)}
        self.broker.commit(items)
        written = [e for e in self.connection.xrange(stream) if e[0] not in known]
        before.restore()
        for entry_id, fields in written[:entries]:
            self.connection.xadd(stream, fields, id=entry_id)
        self.connection.expire(stream, 3600)


@pytest.fixture
def torn(broker, connection):
    return Torn(broker, connection)


def assert_whole(broker, *, tokens):
    chunks, completion = read_all(broker, "a")
    assert token_ids_of(chunks) == [token_at(index) for index in range(tokens)]
    assert completion.usage.completion_tokens == tokens
    assert broker.status("a").state is completion.state
    return completion


def test_an_owner_whose_commit_was_written_by_half_is_told_what_is_there(broker, torn):
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 2)])
    torn.commit(make_item(claimed.claim, 2, 3))
    assert broker.status("a").published == 2
    (reply,) = broker.commit([make_item(claimed.claim, 2, 3)])
    assert (reply.status, reply.published) == (CommitStatus.REPLAYED, 3)
    (reply,) = broker.commit([make_item(claimed.claim, 3, 5, final=True)])
    assert (reply.status, reply.published) == (CommitStatus.OK, 5)
    assert assert_whole(broker, tokens=5).state is State.COMPLETED


def test_the_hash_of_the_log_is_right_again_after_half_a_commit(broker, connection, torn):
    claimed = submit_and_claim(broker, id="a")
    torn.commit(make_item(claimed.claim, 0, 3))
    broker.commit([make_item(claimed.claim, 3, 4, final=True)])
    mended = read_all(broker, "a")[1].prefix_hash
    other = submit_and_claim(broker, id="b")
    broker.commit([make_item(other.claim, 0, 4, final=True)])
    assert mended == read_all(broker, "b")[1].prefix_hash != ""


def test_tokens_that_were_written_by_half_are_not_written_over_with_more_behind_them(broker, torn):
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 2)])
    torn.commit(make_item(claimed.claim, 2, 3))
    # The entry of these three has an id that is larger than the torn one's.
    (reply,) = broker.commit([make_item(claimed.claim, 2, 5)])
    assert (reply.status, reply.published) == (CommitStatus.REPLAYED, 3)
    (reply,) = broker.commit([make_item(claimed.claim, 3, 5, final=True)])
    assert (reply.status, reply.published) == (CommitStatus.OK, 5)
    assert_whole(broker, tokens=5)


def test_a_worker_that_did_not_hear_of_half_a_commit_extends_nothing(broker, connection, torn):
    claimed = submit_and_claim(broker, id="a")
    other = Broker(connection, queue=broker.keys.queue)
    other.commit([make_item(claimed.claim, 0, 2)])
    torn.commit(make_item(claimed.claim, 2, 3))
    # To this one, and to the place, the log ends where it did.
    (reply,) = other.commit([make_item(claimed.claim, 2, 5)])
    assert (reply.status, reply.published) == (CommitStatus.REPLAYED, 3)
    other.commit([make_item(claimed.claim, 3, 5, final=True)])
    assert_whole(broker, tokens=5)


def test_a_place_that_outlived_its_claim_by_half_is_gone_with_the_next_claim(
    broker, connection, clockwork
):
    old = submit_and_claim(broker, id="a")
    broker.commit([make_item(old.claim, 0, 2)])
    place = connection.hget(broker.keys.log_positions, "a")
    clockwork.expire_lease("a")
    broker.reap()
    connection.hset(broker.keys.log_positions, "a", place)
    heir = claim_next(broker)
    assert connection.hexists(broker.keys.log_positions, "a") is False
    (reply,) = broker.commit([make_item(old.claim, 2, 3)])
    assert reply.status is CommitStatus.FENCED
    broker.commit([make_item(heir.claim, 2, 4, final=True)])
    assert_whole(broker, tokens=4)


def test_an_owner_that_did_not_send_more_goes_on_after_half_a_commit(broker, torn):
    claimed = submit_and_claim(broker, id="a")
    torn.commit(make_item(claimed.claim, 0, 3))
    (reply,) = broker.commit([make_item(claimed.claim, 3, 4)])
    assert (reply.status, reply.published) == (CommitStatus.OK, 4)


def test_a_new_owner_goes_on_after_half_a_commit_of_the_old_one(broker, clockwork, torn):
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 1)])
    torn.commit(make_item(claimed.claim, 1, 3))
    clockwork.expire_lease("a")
    broker.reap()
    heir = claim_next(broker)
    assert (heir.num_published, broker.status("a").published) == (3, 3)
    broker.commit([make_item(heir.claim, 3, 4, final=True)])
    assert assert_whole(broker, tokens=4).state is State.COMPLETED


@pytest.mark.parametrize("tokens", [0, 2])
def test_half_an_end_is_brought_to_its_end_by_the_owner(broker, connection, torn, tokens):
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 1)])
    final = make_item(claimed.claim, 1, 1 + tokens, final=True)
    torn.commit(final)
    assert broker.status("a").state is State.RUNNING
    (reply,) = broker.commit([final])
    assert (reply.status, reply.published) == (CommitStatus.REPLAYED, 1 + tokens)
    assert assert_whole(broker, tokens=1 + tokens).state is State.COMPLETED
    assert connection.zcard(broker.keys.lease) == 0
    assert connection.exists(broker.keys.body("a")) == 0


def test_half_an_end_without_its_tokens_before_it_is_written_whole(broker, torn):
    claimed = submit_and_claim(broker, id="a")
    final = make_item(claimed.claim, 0, 2, final=True)
    torn.commit(final, entries=1)
    (reply,) = broker.commit([final])
    assert (reply.status, reply.published) == (CommitStatus.OK, 2)
    assert assert_whole(broker, tokens=2).state is State.COMPLETED


def test_half_an_end_is_brought_to_its_end_by_the_next_claim(broker, connection, clockwork, torn):
    claimed = submit_and_claim(broker, id="a")
    torn.commit(make_item(claimed.claim, 0, 2, final=True))
    clockwork.expire_lease("a")
    broker.reap()
    assert read_and_claim(broker) == NotClaimed("a", NotClaimedReason.FINISHED)
    assert assert_whole(broker, tokens=2).state is State.COMPLETED
    assert broker.commit([make_item(claimed.claim, 0, 2)])[0].status == "fenced"


@pytest.mark.parametrize("how", ["cancelled", "buried", "reaped late"])
def test_a_log_that_is_ahead_of_its_record_can_still_be_ended(broker, clockwork, torn, how):
    claimed = submit_and_claim(broker, id="a")
    torn.commit(make_item(claimed.claim, 0, 3))
    if how == "buried":
        broker.dead_letter(claimed.claim, "tired of it")
    else:
        broker.release([claimed.claim]) if how == "cancelled" else None
        broker.cancel("a")
        clockwork.expire_lease("a")
        broker.reap()
    assert assert_whole(broker, tokens=3).state in (State.CANCELLED, State.FAILED)


def test_an_end_that_readers_have_seen_is_not_followed_by_another(broker, connection, torn):
    claimed = submit_and_claim(broker, id="a")
    torn.commit(make_item(claimed.claim, 0, 3, final=True))
    broker.release([claimed.claim])
    assert broker.cancel("a") is State.COMPLETED
    ends = [f for _, f in connection.xrange(broker.keys.output("a")) if b"done" in f]
    assert len(ends) == 1


def test_a_log_that_is_gone_is_written_again_from_its_beginning(broker, connection):
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 3)])
    connection.delete(broker.keys.output("a"))
    (reply,) = broker.commit([make_item(claimed.claim, 3, 4)])
    assert (reply.status, reply.published) == (CommitStatus.REWIND, 0)
    broker.commit([make_item(claimed.claim, 0, 4, final=True)])
    assert assert_whole(broker, tokens=4).state is State.COMPLETED
