"""Of what the tokens of a request are, where its worker says so with the first of them."""

from dataclasses import replace

import pytest

from quire.errors import ProtocolError
from quire.queue.scripts import load_source
from tests.quire.builders import (
    Snapshot,
    claim_next,
    make_item,
    make_request,
    read_all,
    submit_and_claim,
)


def from_adapter(item, revision):
    return replace(item, fingerprint=f"engine a={revision}")


def test_the_first_token_says_what_generated_it_whoever_claimed_first(broker, clockwork):
    """Else its tokens would be taken for those of an adapter that nobody has used."""
    broker.submit(make_request(id="a"))
    claim_next(broker, fingerprint="engine a=1")
    clockwork.expire_lease("a")
    broker.reap()
    second = claim_next(broker, fingerprint="engine")
    assert second.fingerprint == "engine a=1"
    broker.commit([from_adapter(make_item(second.claim, 0, 3), 2)])
    broker.commit([from_adapter(make_item(second.claim, 3, 4), 2)])
    clockwork.expire_lease("a")
    broker.reap()
    assert claim_next(broker, fingerprint="engine").fingerprint == "engine a=2"


def test_what_generated_the_first_token_is_recorded_for_ever(broker, clockwork):
    first = submit_and_claim(broker, id="a")
    broker.commit([from_adapter(make_item(first.claim, 0, 3), 1)])
    clockwork.expire_lease("a")
    broker.reap()
    second = claim_next(broker, fingerprint="engine")
    broker.commit([from_adapter(make_item(second.claim, 3, 5), 2)])
    broker.commit([from_adapter(make_item(first.claim, 0, 3), 3)])
    assert broker.status("a").fingerprint == "engine a=1"


def test_a_log_that_begins_anew_is_of_who_begins_it(broker, connection, clockwork):
    """Redis has lost all tokens, and the worker that holds them sends them again."""
    claimed = submit_and_claim(broker, id="a")
    before = Snapshot(connection, broker)
    broker.commit([from_adapter(make_item(claimed.claim, 0, 3), 1)])
    before.restore()
    assert broker.status("a").fingerprint is None
    (reply,) = broker.commit([from_adapter(make_item(claimed.claim, 3, 4), 1)])
    assert (reply.status, reply.published) == ("rewind", 0)
    broker.commit([from_adapter(make_item(claimed.claim, 0, 4), 1)])
    assert broker.status("a").fingerprint == "engine a=1"


def test_no_log_is_without_it_not_one_of_a_torn_commit_either(make_broker):
    """What a script does before it stops is there; so it comes before the tokens."""
    xadd = "redis.call('XADD', keys.output, int(item.finish - 1)"
    source = load_source("commit")
    assert source.count(xadd) == 1
    broker = make_broker(sources={"commit": source.replace(xadd, f"error('torn'); {xadd}")})
    claimed = submit_and_claim(broker, id="a")
    with pytest.raises(ProtocolError, match="torn"):
        broker.commit([from_adapter(make_item(claimed.claim, 0, 3), 1)])
    assert broker.status("a").fingerprint == "engine a=1"
    assert read_all(broker, "a") == ([], None)


def test_who_names_no_fingerprint_leaves_that_of_the_first_claim(broker):
    broker.submit(make_request(id="a"))
    claimed = claim_next(broker, fingerprint="engine")
    broker.commit([make_item(claimed.claim, 0, 3)])
    assert broker.status("a").fingerprint == "engine"


def test_many_at_once_each_say_their_own(broker):
    claims = [submit_and_claim(broker, id=name).claim for name in ("a", "b", "c")]
    items = [make_item(claim, 0, 2) for claim in claims]
    items = [
        from_adapter(items[0], 1),
        items[1],
        from_adapter(make_item(claims[2], 0, 2, final=True), 3),
    ]
    assert [reply.status for reply in broker.commit(items)] == ["ok", "ok", "ok"]
    told = [broker.status(name).fingerprint for name in ("a", "b", "c")]
    assert told == ["engine a=1", None, "engine a=3"]
