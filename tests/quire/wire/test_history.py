"""The hash of a log: however it was cut, and whoever grew it back, a reader knows its past."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import Client, OutputRewound
from quire.queue.publish.commit import CommitItem
from quire.wire.history import BASES, EMPTY, PRIMES, extended, hashes_of
from quire.wire.output import ErrorInfo, TokenChunk
from tests.quire.builders import Snapshot, claim_next, make_item, make_request, submit_and_claim

IDS = st.lists(st.integers(0, (1 << 31) - 1), max_size=50)


@pytest.fixture
def client(broker, monkeypatch):
    monkeypatch.setattr("quire.client.handle.MAX_BLOCK_SECONDS", 0.1)
    return Client(broker)


def other_item(claim, start, end):
    """The commit of tokens no honest worker would generate."""
    return CommitItem(claim, start, tuple(range(5000 + start, 5000 + end)), "?" * (end - start))


@given(IDS, IDS)
def test_the_hash_of_two_parts_follows_from_both(left, right):
    before = extended(EMPTY, left)
    powers = [pow(base, len(right), prime) for base, prime in zip(BASES, PRIMES, strict=True)]
    combined = [
        (int(part) * power + own) % prime
        for part, power, own, prime in zip(
            before.split("."), powers, hashes_of(right), PRIMES, strict=True
        )
    ]
    assert (
        extended(before, right) == f"{combined[0]}.{combined[1]}" == extended(EMPTY, left + right)
    )


def test_the_numbers_are_exact_in_lua():
    for prime, base in zip(PRIMES, BASES, strict=True):
        assert all(prime % divisor for divisor in range(2, 5793))
        assert 1 < base < prime < 1 << 25


def test_recorded_hashes_are_computed_as_they_were():
    assert extended(EMPTY, [1, 128, 32_000, 151_643]) == "8717508.6666901"
    assert (EMPTY, extended(EMPTY, [0])) == ("0.0", "1.1")


def test_every_entry_and_the_record_carry_the_hash_of_the_log_so_far(broker):
    claimed = submit_and_claim(broker, id="a")
    for start, end in ((0, 1), (1, 4), (4, 300)):
        broker.commit([make_item(claimed.claim, start, end)])
    broker.commit([make_item(claimed.claim, 300, 300, final=True)])
    read = broker.read_output({"a": 0})["a"]
    hashed, so_far = EMPTY, []
    for chunk in read.chunks:
        hashed = extended(hashed, chunk.token_ids)
        so_far.append(chunk.prefix_hash == hashed)
    assert so_far == [True] * 3
    assert read.completion.prefix_hash == broker.status("a").prefix_hash == hashed


def test_a_log_from_before_there_were_hashes_goes_on_without_them(broker, connection, client):
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 2)])
    connection.hdel(broker.keys.request("a"), "prefix")
    entry = (b"1-1", {b"from": b"0", b"ids": b"\x92\x0d\x10", b"text": b"ab"})
    assert TokenChunk.from_entry(*entry).prefix_hash == ""
    broker.commit([make_item(claimed.claim, 2, 3, final=True)])
    assert broker.read_output({"a": 2})["a"].chunks[0].prefix_hash == ""
    assert [chunk.end for chunk in client.stream("a", after=2)] == [3]


def grow_back(client, broker, connection, *, seen, lost_from, item, end):
    """A reader of `seen` tokens, and a log that was cut to `lost_from` and grew to `end`."""
    handle = client.submit("x")
    claimed = claim_next(broker)
    broker.commit([make_item(claimed.claim, 0, lost_from)])
    disk = Snapshot(connection, broker)
    broker.commit([make_item(claimed.claim, lost_from, seen)])
    stream = handle.stream()
    assert [next(stream).end, next(stream).end] == [lost_from, seen]
    disk.restore()
    broker.commit([item(claimed.claim, lost_from, end)])
    return handle, stream, claimed


def test_a_log_that_grew_back_by_other_tokens_is_never_a_silent_rewrite(client, broker, connection):
    _, stream, _ = grow_back(
        client, broker, connection, seen=5, lost_from=2, item=other_item, end=9
    )
    with pytest.raises(OutputRewound) as caught:
        next(stream)
    assert (caught.value.seen, caught.value.published, caught.value.kept) == (5, 9, 0)


def test_a_log_that_grew_back_by_the_same_tokens_is_the_same_log(client, broker, connection):
    _, stream, _ = grow_back(client, broker, connection, seen=5, lost_from=2, item=make_item, end=9)
    assert next(stream).token_ids == make_item(None, 5, 9).token_ids


def test_a_log_that_grew_back_to_the_very_place_is_noticed_without_news(client, broker, connection):
    _, stream, _ = grow_back(
        client, broker, connection, seen=5, lost_from=2, item=other_item, end=5
    )
    with pytest.raises(OutputRewound) as caught:
        next(stream)
    assert (caught.value.seen, caught.value.published, caught.value.kept) == (5, 5, 0)


def test_an_end_at_the_very_place_is_noticed_too(client, broker, connection):
    _, stream, claimed = grow_back(
        client, broker, connection, seen=5, lost_from=2, item=other_item, end=5
    )
    broker.commit([make_item(claimed.claim, 5, 5, final=True)])
    with pytest.raises(OutputRewound):
        next(stream)


@pytest.mark.parametrize(("item", "kept"), [(make_item, 4), (other_item, 0)])
def test_of_a_log_that_became_shorter_a_reader_keeps_what_is_certain(
    client, broker, connection, item, kept
):
    _, stream, _ = grow_back(client, broker, connection, seen=9, lost_from=2, item=item, end=4)
    with pytest.raises(OutputRewound) as caught:
        next(stream)
    assert (caught.value.seen, caught.value.published, caught.value.kept) == (9, 4, kept)


def test_a_reader_in_another_process_knows_its_log_again_by_the_hash(client, broker):
    handle = client.submit("x")
    claimed = claim_next(broker)
    broker.commit([make_item(claimed.claim, 0, 3)])
    last = next(handle.stream())
    broker.commit([make_item(claimed.claim, 3, 4, final=True)])
    stream = client.stream(handle.request_id, after=last.end, prefix_hash=last.prefix_hash)
    assert [chunk.end for chunk in stream] == [4]
    with pytest.raises(OutputRewound):
        next(client.stream(handle.request_id, after=last.end, prefix_hash="1.2"))


def test_a_number_beyond_the_log_may_be_wrong_and_what_a_reader_has_had_was_there(
    client, broker, connection
):
    handle = client.submit("x")
    claimed = claim_next(broker)
    broker.commit([make_item(claimed.claim, 0, 3)])
    with pytest.raises(OutputRewound, match="either that number is wrong, or Redis lost") as caught:
        next(handle.stream(after=9))
    assert (caught.value.seen, caught.value.published, caught.value.is_certain) == (9, 3, False)
    with pytest.raises(OutputRewound, match="Redis lost tokens: of the 9") as caught:
        next(handle.stream(after=9, prefix_hash=extended(EMPTY, range(9))))
    assert caught.value.is_certain
    disk = Snapshot(connection, broker)
    broker.commit([make_item(claimed.claim, 3, 9)])
    stream = handle.stream(after=4)
    assert next(stream).end == 9
    disk.restore()
    with pytest.raises(OutputRewound, match="Redis lost tokens: of the 9") as caught:
        next(stream)
    assert caught.value.is_certain


def test_a_reader_without_a_hash_takes_the_first_it_hears(client, broker):
    handle = client.submit("x")
    claimed = claim_next(broker)
    broker.commit([make_item(claimed.claim, 0, 3)])
    broker.commit([make_item(claimed.claim, 3, 5)])
    broker.commit([make_item(claimed.claim, 5, 6, final=True)])
    assert [chunk.end for chunk in handle.stream(after=2)] == [3, 5, 6]


def test_another_life_without_its_tokens_is_a_rewrite(client, broker):
    client.submit_many([make_request(id="a")])
    claimed = claim_next(broker)
    broker.commit([make_item(claimed.claim, 0, 3)])
    stream = client.stream("a")
    next(stream)
    broker.dead_letter(claimed.claim, "tired", error=ErrorInfo("x", "y"))
    broker.requeue(broker.dead_letters()[0], keep_tokens=False)
    broker.commit([other_item(claim_next(broker).claim, 0, 6)])
    with pytest.raises(OutputRewound):
        next(stream)
