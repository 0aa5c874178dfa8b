"""The short path of a commit gives up wherever something is not as usual."""

import pytest

from quire.transitions import CommitStatus
from tests.quire.builders import make_item, read_all, submit_and_claim, token_at, token_ids_of


@pytest.fixture
def claimed(broker):
    """A request whose log has begun, so that the next tokens may take the short path."""
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 2)])
    return claimed


def test_a_log_that_is_gone_is_sent_again_and_lives_no_longer_than_the_others(
    broker, connection, claimed
):
    connection.delete(broker.keys.output("a"))
    (reply,) = broker.commit([make_item(claimed.claim, 2, 3)])
    assert (reply.status, reply.published) == (CommitStatus.REWIND, 0)
    broker.commit([make_item(claimed.claim, 0, 3)])
    assert token_ids_of(read_all(broker, "a")[0]) == [token_at(index) for index in range(3)]
    assert connection.pttl(broker.keys.output("a")) > 0


def test_both_paths_write_the_same_log(broker, connection, claimed):
    broker.commit([make_item(claimed.claim, 2, 5)])
    # An item with an end takes the long path, any other the short one.
    item = make_item(claimed.claim, 5, 6)
    broker.commit([type(item)(item.claim, item.start, item.token_ids, item.text)])
    entries = connection.xrange(broker.keys.output("a"))
    assert [sorted(fields) for _, fields in entries] == [
        [b"ends", b"from", b"ids", b"prefix", b"text"],
        [b"ends", b"from", b"ids", b"prefix", b"text"],
        [b"from", b"ids", b"prefix", b"text"],
    ]
    broker.commit([make_item(claimed.claim, 6, 8, final=True)])
    chunks, completion = read_all(broker, "a")
    assert token_ids_of(chunks) == [token_at(index) for index in range(8)]
    assert completion.prefix_hash == broker.status("a").prefix_hash == chunks[-1].prefix_hash


def test_a_commit_leaves_the_lease_to_the_heartbeat(broker, connection):
    claims = [submit_and_claim(broker, id=name).claim for name in "abc"]
    connection.zadd(broker.keys.lease, {claim.request_id: 1 for claim in claims})
    for start in (0, 1):
        # The first tokens of a log take the long path, those after them the short one.
        replies = broker.commit([make_item(claim, start, start + 1) for claim in claims])
        assert [reply.status for reply in replies] == [CommitStatus.OK] * 3
        leases = connection.zrange(broker.keys.lease, 0, -1, withscores=True)
        assert [expiry for _, expiry in leases] == [1, 1, 1]
    assert all(beat.alive for beat in broker.heartbeat(claims))
    assert all(connection.zscore(broker.keys.lease, name) > 1 for name in "abc")


def test_items_of_both_paths_and_with_and_without_a_group_stand_in_one_call(broker):
    names = ["a", "g~b", "c", "g~d", "e"]
    claims = [submit_and_claim(broker, id=name).claim for name in names]
    broker.commit([make_item(claim, 0, 2) for claim in claims[:3]])
    items = [make_item(claims[0], 2, 3), make_item(claims[1], 2, 4, final=True)]
    items += [make_item(claims[2], 2, 5), make_item(claims[3], 0, 1, final=True)]
    items.append(make_item(claims[4], 1, 2))
    replies = [(reply.status.value, reply.published) for reply in broker.commit(items)]
    assert replies == [("ok", 3), ("ok", 4), ("ok", 5), ("ok", 1), ("rewind", 0)]
    for name, length in zip(names[:4], (3, 4, 5, 1), strict=True):
        chunks, completion = read_all(broker, name)
        assert token_ids_of(chunks) == [token_at(index) for index in range(length)]
        assert (completion is not None) == name.startswith("g~")


def test_a_cancelled_request_is_told_so_on_the_short_path_too(broker, claimed):
    broker.cancel("a")
    (reply,) = broker.commit([make_item(claimed.claim, 2, 3)])
    assert (reply.status, reply.cancel_requested) == (CommitStatus.OK, True)


@pytest.mark.real_redis
def test_the_usual_item_takes_the_short_path(real_broker, real_connection):
    claims = [submit_and_claim(real_broker, id=name).claim for name in "ab"]
    real_broker.commit([make_item(claim, 0, 1) for claim in claims])
    real_connection.config_resetstat()
    real_broker.commit([make_item(claim, 1, 2) for claim in claims])
    # Only the long path looks for the newest entry of a log.
    calls = real_connection.info("commandstats")
    assert calls["cmdstat_xadd"]["calls"] == 2 and "cmdstat_xrevrange" not in calls
