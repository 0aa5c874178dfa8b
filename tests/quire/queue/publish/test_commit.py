"""COMMIT: the fence, the replay, the rewind, and the end of an output."""

import pytest

from quire.queue.publish.commit import CommitItem, CommitReply, CommitStatus
from quire.queue.request.claims import Claim
from quire.wire.output import FinishReason, State
from tests.quire.builders import (
    Snapshot,
    claim_next,
    make_completion,
    make_item,
    make_request,
    read_all,
    submit_and_claim,
    text_of,
    token_at,
    token_ids_of,
)
from tests.quire.servers import on_the_real_server

OK, FENCED = CommitStatus.OK, CommitStatus.FENCED
REWIND, REPLAYED = CommitStatus.REWIND, CommitStatus.REPLAYED


def statuses(replies: list[CommitReply]) -> list[tuple[CommitStatus, int]]:
    return [(reply.status, reply.published) for reply in replies]


def test_tokens_are_published_at_ids_that_say_how_many_there_are(broker, connection):
    claimed = submit_and_claim(broker, id="a")
    items = [make_item(claimed.claim, 0, 1), make_item(claimed.claim, 1, 4)]
    assert statuses([broker.commit([item])[0] for item in items]) == [(OK, 1), (OK, 4)]
    broker.commit([make_item(claimed.claim, 4, 5, final=True)])
    ids = [entry_id for entry_id, _ in connection.xrange(broker.keys.output("a"))]
    assert ids == [b"0-1", b"3-1", b"4-1", b"5-1"]
    chunks, completion = read_all(broker, "a")
    assert token_ids_of(chunks) == [token_at(index) for index in range(5)]
    assert "".join(chunk.text for chunk in chunks) == "".join(map(text_of, range(5)))
    assert (completion.state, completion.usage.completion_tokens) == (State.COMPLETED, 5)


def test_a_commit_repeated_after_a_lost_reply_changes_nothing(broker, connection):
    claimed = submit_and_claim(broker, id="a")
    item = make_item(claimed.claim, 0, 3)
    assert statuses(broker.commit([item])) == [(OK, 3)]
    assert statuses(broker.commit([item])) == [(REPLAYED, 3)]
    assert connection.xlen(broker.keys.output("a")) == 1


def test_a_last_commit_repeated_after_a_lost_reply_is_a_success(broker, connection):
    claimed = submit_and_claim(broker, id="a")
    item = make_item(claimed.claim, 0, 3, final=True)
    assert statuses(broker.commit([item])) == [(OK, 3)]
    assert statuses(broker.commit([item])) == [(REPLAYED, 3)]
    assert connection.xlen(broker.keys.output("a")) == 2
    assert connection.zcard(broker.keys.lease) == 0


def test_an_item_that_overlaps_the_log_is_to_be_sent_again_from_its_end(broker):
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 3)])
    assert statuses(broker.commit([make_item(claimed.claim, 1, 5)])) == [(REPLAYED, 3)]
    assert statuses(broker.commit([make_item(claimed.claim, 3, 5)])) == [(OK, 5)]


def test_an_end_whose_tokens_are_all_in_the_log_is_written(broker):
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 3)])
    assert statuses(broker.commit([make_item(claimed.claim, 1, 3, final=True)])) == [(OK, 3)]
    chunks, completion = read_all(broker, "a")
    assert (chunks[-1].end, completion.state) == (3, State.COMPLETED)


def test_an_end_may_come_without_tokens(broker, connection):
    claimed = submit_and_claim(broker, id="a")
    rejected = make_completion("a", state=State.FAILED, finish_reason=FinishReason.REJECTED)
    (reply,) = broker.commit([CommitItem(claimed.claim, 0, (), "", completion=rejected)])
    assert (reply.status, reply.published) == (OK, 0)
    assert [entry_id for entry_id, _ in connection.xrange(broker.keys.output("a"))] == [b"0-1"]
    assert read_all(broker, "a")[1].finish_reason is FinishReason.REJECTED


def test_a_zombie_is_fenced_and_nothing_it_says_is_seen(broker, clockwork):
    zombie = submit_and_claim(broker, id="a")
    broker.commit([make_item(zombie.claim, 0, 2)])
    clockwork.expire_lease("a")
    broker.reap()
    assert statuses(broker.commit([make_item(zombie.claim, 2, 4)])) == [(FENCED, 0)]
    heir = claim_next(broker)
    assert statuses(broker.commit([make_item(zombie.claim, 2, 4, final=True)])) == [(FENCED, 0)]
    broker.commit([make_item(heir.claim, 2, 3, final=True)])
    assert statuses(broker.commit([make_item(zombie.claim, 3, 4, final=True)])) == [(FENCED, 0)]
    chunks, _ = read_all(broker, "a")
    assert [chunk.epoch for chunk in chunks] == [1, 3] and chunks[-1].end == 3


def test_the_same_epoch_with_another_owner_is_fenced(broker):
    claimed = submit_and_claim(broker)
    stranger = Claim(claimed.claim.request_id, claimed.claim.epoch, "00" * 16)
    assert statuses(broker.commit([make_item(stranger, 0, 1)])) == [(FENCED, 0)]
    assert not broker.heartbeat([stranger])[0].alive
    assert broker.release([stranger]) == [False]
    assert not broker.dead_letter(stranger, "no")


def test_a_cancelled_record_fences_the_worker_that_was_running(broker, clockwork):
    claimed = submit_and_claim(broker, id="a")
    broker.cancel("a")
    clockwork.expire_lease("a")
    broker.reap()
    final = make_item(claimed.claim, 0, 1, final=True)
    assert statuses(broker.commit([final])) == [(FENCED, 0)]


def test_a_forgotten_request_is_fenced(broker):
    assert statuses(broker.commit([make_item(Claim("ghost", 1, "00" * 16), 0, 1)])) == [(FENCED, 0)]


def test_a_log_that_lost_its_tail_is_filled_again_from_the_owners_memory(broker, connection):
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 2)])
    disk = Snapshot(connection, broker)
    broker.commit([make_item(claimed.claim, 2, 6)])
    disk.restore()
    assert statuses(broker.commit([make_item(claimed.claim, 6, 7)])) == [(REWIND, 2)]
    assert statuses(broker.commit([make_item(claimed.claim, 2, 7, final=True)])) == [(OK, 7)]
    chunks, _ = read_all(broker, "a")
    assert token_ids_of(chunks) == [token_at(index) for index in range(7)]


def test_a_server_that_forgot_a_claim_fences_its_owner_even_at_the_same_epoch(broker, connection):
    broker.submit(make_request(id="a"))
    disk = Snapshot(connection, broker)
    lost = claim_next(broker)
    broker.commit([make_item(lost.claim, 0, 2)])
    disk.restore()
    heir = claim_next(broker)
    assert heir.claim.epoch == lost.claim.epoch, "this is why the epoch alone is no fence"
    assert statuses(broker.commit([make_item(lost.claim, 2, 3)])) == [(FENCED, 0)]
    assert statuses(broker.commit([make_item(heir.claim, 0, 1)])) == [(OK, 1)]


@on_the_real_server
def test_many_items_are_judged_one_by_one_over_several_calls(broker):
    broker.submit_many([make_request(id=f"r{index}") for index in range(600)])
    answers = broker.claim(broker.peek(count=600, block_seconds=0))
    claims = [answer.claim for answer in answers]
    items = [
        make_item(claim if index % 3 else Claim(claim.request_id, 9, claim.owner), 0, 1)
        for index, claim in enumerate(claims)
    ]
    replies = broker.commit(items)
    assert [reply.status for reply in replies] == [OK if i % 3 else FENCED for i in range(600)]
    assert [beat.alive for beat in broker.heartbeat(claims)] == [True] * 600
    assert broker.release(claims) == [True] * 600


def test_committing_nothing_is_an_empty_answer(broker):
    assert (broker.commit([]), broker.heartbeat([]), broker.release([])) == ([], [], [])


def test_an_empty_item_is_our_own_mistake(broker):
    with pytest.raises(AssertionError):
        CommitItem(Claim("a", 1, "00"), 0, (), "")


def test_a_reader_gets_exactly_what_it_does_not_have(broker):
    claimed = submit_and_claim(broker, id="a")
    for start, end in ((0, 1), (1, 5), (5, 6)):
        broker.commit([make_item(claimed.claim, start, end, final=end == 6)])
    expected = [token_at(index) for index in range(6)]
    for seen in range(7):
        read = broker.read_output({"a": seen})["a"]
        assert token_ids_of(list(read.chunks)) == expected[seen:]
        assert "".join(chunk.text for chunk in read.chunks) == "".join(map(text_of, range(seen, 6)))
        assert read.completion is not None


def test_one_read_follows_many_outputs_each_from_its_own_token(broker):
    broker.submit_many([make_request(id=name) for name in "abc"])
    answers = broker.claim(broker.peek(count=3, block_seconds=0))
    broker.commit([make_item(answer.claim, 0, 3) for answer in answers])
    reads = broker.read_output({"a": 0, "b": 2, "c": 3, "ghost": 0})
    assert {name: len(token_ids_of(list(read.chunks))) for name, read in reads.items()} == {
        "a": 3,
        "b": 1,
    }
