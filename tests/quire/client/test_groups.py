"""Groups: many requests submitted as one, counted as they go, read as they end."""

import threading
from dataclasses import replace

import pytest

from quire import Client, InvalidRequest, QueueFull, QueueLimits, WaitTimeout
from quire.client.following import Following
from quire.queue.lease.lease import BackOff
from quire.wire.output import ErrorInfo, State
from quire.wire.protocol import GenerationRequest
from tests.quire.builders import claim_next, make_completion, make_item, make_request, text_of


@pytest.fixture
def client(broker, monkeypatch):
    monkeypatch.setattr("quire.client.group_handle.MAX_BLOCK_SECONDS", 0.1)
    return Client(broker)


def rows(*names):
    return [{"prompt": name, "request_id": name} for name in names]


def finish(broker, claimed, *, tokens=2):
    broker.commit([make_item(claimed.claim, 0, tokens, final=True)])
    return claimed.claim.request_id


def test_the_members_of_a_group_are_found_by_their_ids(client, broker):
    group = client.submit_many(rows("a", "b"), group="eval-7")
    assert group.counts() == {State.QUEUED: 2}
    assert broker.open_members("eval-7") == ["eval-7~a", "eval-7~b"]
    assert client.status("eval-7~a").state is State.QUEUED
    assert repr(group).removeprefix("Async") == "GroupHandle('eval-7')"


def test_the_counts_follow_every_state_of_every_member(client, broker, clockwork):
    group = client.submit_many(rows("a", "b", "c", "d"), group="g")
    claims = [claim_next(broker) for _ in range(3)]
    assert group.counts() == {State.QUEUED: 1, State.RUNNING: 3}
    finish(broker, claims[0])
    broker.fail(claims[1].claim, ErrorInfo("x", "y"), retry=BackOff())
    broker.dead_letter(claims[2].claim, "tired")
    client.cancel("g~d")
    assert group.counts() == {
        State.COMPLETED: 1, State.SCHEDULED: 1, State.FAILED: 1, State.CANCELLED: 1,
    }  # fmt: skip
    clockwork.expire_delay("g~b")
    broker.promote()
    broker.requeue(broker.dead_letters()[0], keep_tokens=False)
    assert group.counts() == {State.COMPLETED: 1, State.QUEUED: 2, State.CANCELLED: 1}
    assert broker.open_members("g") == ["g~b", "g~c"]


def test_results_come_as_they_end_and_not_as_they_were_submitted(client, broker):
    group = client.submit_many(rows("a", "b", "c"), group="g")
    claims = [claim_next(broker) for _ in range(3)]
    results = group.results()
    ended = []
    for claimed in reversed(claims):
        finish(broker, claimed)
        ended.append(next(results).request_id)
    assert ended == ["g~c", "g~b", "g~a"]
    assert list(results) == []
    assert [completion.text for completion in group.results()] == [text_of(0) + text_of(1)] * 3


def test_a_reader_that_waits_is_woken_by_each_end(client, broker):
    group = client.submit_many(rows("a", "b"), group="g")
    found = []
    reader = threading.Thread(target=lambda: found.extend(group.results(timeout=30)))
    reader.start()
    for _ in range(2):
        finish(broker, claim_next(broker))
    reader.join(30)
    assert sorted(completion.request_id for completion in found) == ["g~a", "g~b"]


@pytest.mark.parametrize("ahead_ms", [0, 3_600_000], ids=["the same clock", "a clock behind"])
def test_ends_written_after_redis_lost_its_last_ones_are_told_whatever_its_clock_says(
    client, broker, connection, ahead_ms
):
    """As by a replica that had not got them: a reader's place is beyond all it will write."""
    group = client.submit_many(rows("a", "b", "c"), group="g")
    claims = [claim_next(broker) for _ in range(3)]
    for claimed in claims[:2]:
        finish(broker, claimed)
    _, _, ends = broker.keys.of_group("g")
    (first, of_a), (last, of_b) = connection.xrange(ends)
    ahead = f"{int(last.partition(b'-')[0]) + ahead_ms}-7"
    written_anew(connection, ends, {first: of_a, ahead: of_b})
    results = group.results(timeout=30)
    told = [next(results).request_id for _ in range(2)]
    written_anew(connection, ends, {first: of_a})
    finish(broker, claims[2])
    told += [completion.request_id for completion in results]
    assert told == ["g~a", "g~b", "g~c"]


def written_anew(connection, stream, entries):
    connection.delete(stream)
    for entry_id, fields in entries.items():
        connection.xadd(stream, fields, id=entry_id)
    connection.expire(stream, 60)


def test_members_that_did_not_complete_are_among_the_results(client, broker):
    group = client.submit_many(rows("a", "b"), group="g")
    finish(broker, claim_next(broker))
    assert group.cancel() == 1
    assert {c.request_id: c.state for c in group.results()} == {
        "g~a": State.COMPLETED, "g~b": State.CANCELLED,
    }  # fmt: skip
    assert group.cancel() == 0


def test_waiting_for_a_group_ends_with_its_last_member_or_its_patience(client, broker):
    group = client.submit_many(rows("a", "b"), group="g")
    finish(broker, claim_next(broker))
    with pytest.raises(WaitTimeout, match="g has not ended"):
        group.wait(timeout=0.05)
    finish(broker, claim_next(broker))
    assert group.wait(timeout=30) == {State.COMPLETED: 2}


def test_a_group_nobody_submitted_is_empty_and_at_its_end(client):
    group = client.attach_group("nobody")
    assert (group.counts(), list(group.results()), group.cancel()) == ({}, [], 0)


def test_a_submit_that_is_repeated_adds_no_member(client, broker):
    for _ in range(2):
        group = client.submit_many(rows("a", "b"), group="g")
    client.submit_many([{"prompt": "a", "request_id": "g~a"}], group="g")
    assert group.counts() == {State.QUEUED: 2}


def test_a_group_takes_members_later_and_outlives_them_all(make_broker, connection):
    broker = make_broker(max_queue_seconds=1000, retention_seconds=100)
    client = Client(broker)
    client.submit_many(rows("a"), group="g")
    later = make_request(id="b", not_before_ms=broker.now_ms() + 500_000)
    client.submit_many([later], group="g")
    finish(broker, claim_next(broker))
    assert connection.pttl(broker.keys.request("g~a")) <= 100_000
    for key in broker.keys.of_group("g"):
        assert 1_500_000 < connection.pttl(key) <= 1_600_000
    assert len(set(broker.keys.of_group("g"))) == 3


def test_a_member_that_was_forgotten_counts_as_expired(client, broker, connection):
    group = client.submit_many(rows("a", "b"), group="g")
    for name in ("g~a", "g~b"):
        connection.delete(*broker.keys.of_request(name))
    broker.claim(broker.peek(count=9, block_seconds=0))
    assert group.counts() == {State.EXPIRED: 2}
    errors = [completion.error.code for completion in group.results()]
    assert errors == ["result_expired"] * 2


def test_a_member_whose_end_cannot_be_read_is_told_as_failed_and_hides_no_other(
    client, broker, connection
):
    group = client.submit_many(rows("a", "b"), group="g")
    claims = [claim_next(broker) for _ in range(2)]
    finish(broker, claims[0])
    log = broker.keys.output("g~a")
    connection.delete(log)
    connection.xadd(log, {"not": "ours"}, id="9-9")
    connection.expire(log, 60)
    finish(broker, claims[1])
    bad, good = group.results(timeout=30)
    assert (bad.request_id, bad.state, bad.error.code) == ("g~a", State.FAILED, "damaged")
    assert (good.request_id, good.state) == ("g~b", State.COMPLETED)


def requeue_a_failed_one(broker):
    broker.dead_letter(claim_next(broker).claim, "tired")
    broker.requeue(broker.dead_letters()[0], keep_tokens=False)


def begin_another_life(broker, lengths):
    """The member of the only dead letter says other tokens now, in entries of these lengths."""
    broker.requeue(broker.dead_letters()[0], keep_tokens=False)
    claim, start = claim_next(broker).claim, 0
    for length in lengths:
        item = make_item(claim, start, start + length)
        start += length
        if start == sum(lengths):
            item = replace(item, completion=make_completion(claim.request_id))
        broker.commit([replace(item, token_ids=(7,) * length, text="x" * length)])


@pytest.mark.parametrize("lengths", [(2, 2), (1,), (2, 1, 4)])
def test_a_member_that_was_requeued_under_the_readers_hands_is_told_whole(
    client, broker, monkeypatch, lengths
):
    monkeypatch.setattr("quire.queue.reader.Reader.max_entries", 1)
    monkeypatch.setattr("quire.queue.reader_async.AsyncReader.max_entries", 1)
    group = client.submit_many(rows("a", "b"), group="g")
    claims = [claim_next(broker) for _ in range(2)]
    for start in (0, 2):
        broker.commit([make_item(claims[0].claim, start, start + 2)])
    broker.dead_letter(claims[0].claim, "tired")
    finish(broker, claims[1])
    take, lives = Following.take, [lengths]

    def take_and_look_away(following, read):
        yield from take(following, read)
        if lives:
            begin_another_life(broker, lives.pop())

    monkeypatch.setattr("quire.client.following.Following.take", take_and_look_away)
    told = list(group.results(timeout=30))
    assert [(one.request_id, one.state) for one in told] == [
        ("g~a", State.COMPLETED), ("g~b", State.COMPLETED),
    ]  # fmt: skip
    assert (told[0].text, told[0].token_ids) == ("x" * sum(lengths), (7,) * sum(lengths))


def test_a_member_whose_log_contradicts_itself_hides_no_other(client, broker, connection):
    group = client.submit_many(rows("a", "b"), group="g")
    for _ in range(2):
        finish(broker, claim_next(broker))
    log = broker.keys.output("g~a")
    entries = connection.xrange(log)
    connection.delete(log)
    for entry_id, fields in entries:
        connection.xadd(log, fields | {b"prefix": b"1.1"}, id=entry_id)
    connection.expire(log, 60)
    bad, good = group.results(timeout=30)
    assert (bad.request_id, bad.state, bad.error.code) == ("g~a", State.FAILED, "damaged")
    assert (good.request_id, good.state) == ("g~b", State.COMPLETED)


def test_a_member_that_is_open_again_is_waited_for_no_longer_than_the_patience(
    client, broker, clock
):
    group = client.submit_many(rows("a", "b"), group="g")
    requeue_a_failed_one(broker)
    finish(broker, claim_next(broker))
    results = group.results(timeout=60)
    # The other one is not kept waiting behind it.
    assert next(results).request_id == "g~b"
    clock.ahead = 60.0
    with pytest.raises(WaitTimeout, match="g has not ended"):
        next(results)


def test_a_member_that_was_requeued_is_told_once_and_by_its_last_end(client, broker):
    group = client.submit_many(rows("a"), group="g")
    requeue_a_failed_one(broker)
    finish(broker, claim_next(broker))
    assert len(broker.read_ends("g")) == 2
    (told,) = group.results(timeout=30)
    assert (told.request_id, told.state, told.text) == ("g~a", State.COMPLETED, "ab")


def test_a_reader_that_waits_for_a_requeued_member_gets_its_later_end(client, broker):
    group = client.submit_many(rows("a"), group="g")
    requeue_a_failed_one(broker)
    found = []
    reader = threading.Thread(target=lambda: found.extend(group.results(timeout=30)))
    reader.start()
    finish(broker, claim_next(broker))
    reader.join(30)
    assert [(one.request_id, one.state) for one in found] == [("g~a", State.COMPLETED)]


def test_ids_are_minted_inside_the_group(client):
    group = client.submit_many([{"prompt": "x"}] * 2, group="g")
    assert group.counts() == {State.QUEUED: 2}


@pytest.mark.parametrize("group", ["", "a~b", "a b", "x" * 65])
def test_a_group_has_a_name_that_fits_into_an_id(client, group):
    with pytest.raises(InvalidRequest, match="group"):
        client.submit_many(rows("a"), group=group)


@pytest.mark.parametrize("request_id", ["other~a", "x" * 128])
def test_an_id_that_cannot_be_a_member_is_refused(client, request_id):
    with pytest.raises(InvalidRequest) as caught:
        client.submit_many([{"prompt": "x", "request_id": request_id}], group="g")
    assert caught.value.field == "id"


@pytest.mark.parametrize("request_id", ["~a", "a~", "a~b~c"])
def test_an_id_has_a_group_or_none(request_id):
    with pytest.raises(Exception, match="pattern"):
        GenerationRequest(id=request_id, kind="tokens", body={})


def test_a_group_that_does_not_fit_tells_which_of_it_is_in(client, broker):
    broker.set_limits(QueueLimits(requests=1))
    with pytest.raises(QueueFull) as caught:
        client.submit_many(rows("a", "b"), group="g")
    assert caught.value.accepted == ("g~a",)
    assert client.attach_group("g").counts() == {State.QUEUED: 1}
