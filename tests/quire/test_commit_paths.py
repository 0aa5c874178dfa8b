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
    # Without text ends an item takes the short path, with them it does not.
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


def test_every_lease_of_a_call_is_renewed(broker, connection):
    claims = [submit_and_claim(broker, id=name).claim for name in "abc"]
    broker.commit([make_item(claim, 0, 1) for claim in claims])
    for claim in claims:
        connection.zadd(broker.keys.lease, {claim.request_id: 1})
    # Two on the short path, one on the long one.
    short = [type(i)(i.claim, i.start, i.token_ids, i.text) for i in (
        make_item(claim, 1, 2) for claim in claims[:2]
    )]  # fmt: skip
    broker.commit([*short, make_item(claims[2], 1, 2)])
    now = broker.now_ms()
    leases = connection.zrange(broker.keys.lease, 0, -1, withscores=True)
    assert len(leases) == 3 and all(expiry > now for _, expiry in leases)
