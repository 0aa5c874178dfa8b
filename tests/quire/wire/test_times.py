"""The time of each published chunk: by the clock of Redis, and the same for every reader."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from quire import Client
from quire.errors import ProtocolError
from quire.wire.output import TokenChunk
from tests.quire.builders import (
    claim_next,
    make_item,
    make_request,
    pass_moment,
    read_all,
    submit_and_claim,
)

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture
def client(broker, monkeypatch):
    monkeypatch.setattr("quire.client.handle.MAX_BLOCK_SECONDS", 0.1)
    return Client(broker)


def commit_at_a_later_time(broker, item) -> tuple[int, int]:
    """Commits in a millisecond of its own; returns the moments before and after."""
    pass_moment(broker)
    before = broker.now_ms()
    broker.commit([item])
    return before, broker.now_ms()


def ms_of(chunk: TokenChunk) -> int:
    assert chunk.published_at is not None
    return round(chunk.published_at * 1000)


def test_each_chunk_has_the_time_at_which_it_was_published(client, broker):
    claim = submit_and_claim(broker, id="a").claim
    # The first by COMMIT, the next two by EXTEND, the last with the end.
    items = [make_item(claim, n, n + 1, final=n == 3) for n in range(4)]
    moments = [commit_at_a_later_time(broker, item) for item in items]
    chunks = list(client.attach("a").stream())
    assert len(chunks) == 4
    for chunk, (before, after) in zip(chunks, moments, strict=True):
        assert before <= ms_of(chunk) <= after
    assert all(ms_of(one) < ms_of(other) for one, other in pairwise(chunks))


def test_a_resumed_request_keeps_the_times_of_its_earlier_tokens(client, broker, clockwork):
    claim = submit_and_claim(broker, id="a").claim
    for start, end in ((0, 1), (1, 3)):
        commit_at_a_later_time(broker, make_item(claim, start, end))
    earlier = [chunk.published_at for chunk in read_all(broker, "a")[0]]
    clockwork.expire_lease("a")
    broker.reap()
    heir = claim_next(broker)
    assert [chunk.published_at for chunk in heir.published] == earlier
    before, after = commit_at_a_later_time(broker, make_item(heir.claim, 3, 4, final=True))
    *old, new = client.attach("a").stream()
    assert [chunk.published_at for chunk in old] == earlier
    assert before <= ms_of(new) <= after


def test_a_cut_chunk_keeps_its_time(client, broker):
    claim = submit_and_claim(broker, id="a").claim
    broker.commit([make_item(claim, 0, 4, final=True)])
    (whole,) = client.attach("a").stream()
    (rest,) = client.attach("a").stream(after=2)
    assert rest.start == 2 and rest.published_at == whole.published_at


def test_an_entry_of_an_earlier_version_has_no_time():
    entry = json.loads((GOLDENS / "log-entries.json").read_text())[0]
    fields = {name.encode(): bytes.fromhex(value) for name, value in entry["fields"].items()}
    assert TokenChunk.from_entry(entry["id"].encode(), fields).published_at is None


def test_a_time_that_is_no_number_is_damage(broker, connection):
    claim = submit_and_claim(broker, id="a").claim
    broker.commit([make_item(claim, 0, 1)])
    ((entry_id, fields),) = connection.xrange(broker.keys.output("a"))
    with pytest.raises(ProtocolError, match="damaged"):
        TokenChunk.from_entry(entry_id, {**fields, b"at_ms": b"noon"})


def test_the_times_of_many_requests_of_one_commit_are_equal(broker):
    for name in ("a", "b"):
        broker.submit(make_request(id=name))
    claims = [claim_next(broker).claim for _ in range(2)]
    broker.commit([make_item(claim, 0, 1) for claim in claims])
    broker.commit([make_item(claim, 1, 2) for claim in claims])
    one, other = (read_all(broker, name)[0] for name in ("a", "b"))
    assert [chunk.published_at for chunk in one] == [chunk.published_at for chunk in other]
