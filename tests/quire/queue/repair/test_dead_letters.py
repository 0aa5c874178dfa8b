"""Dead letters: which are kept, and how one is given another life, with its tokens or without."""

import re
from dataclasses import replace

import pytest

from quire.errors import UnknownRequest
from quire.queue.repair.damage import MAX_REASON_LENGTH
from quire.queue.scripts import load_source
from quire.wire.output import ErrorInfo, State
from tests.quire.builders import (
    claim_next,
    make_item,
    make_request,
    pass_moment,
    read_all,
    submit_and_claim,
    token_at,
    token_ids_of,
)


def bury(broker, *, tokens=3, **changes):
    """A request that was given up after some tokens; returns its letter."""
    claimed = submit_and_claim(broker, **{"id": "a", "metadata": {"row": 1}, **changes})
    if tokens:
        broker.commit([make_item(claimed.claim, 0, tokens)])
    broker.dead_letter(claimed.claim, "nobody knows")
    return broker.dead_letters()[0]


def finish(broker, claimed, *, tokens=5):
    broker.commit([make_item(claimed.claim, claimed.num_published, tokens, final=True)])
    return read_all(broker, claimed.claim.request_id)


def test_a_requeued_letter_goes_on_after_the_tokens_it_kept(broker):
    letter = bury(broker, priority="high")
    assert broker.requeue(letter, keep_tokens=True) is State.QUEUED
    assert broker.dead_letters() == []
    claimed = claim_next(broker)
    assert (claimed.num_published, claimed.attempts) == (3, 1)
    assert claimed.request_bytes == letter.original
    chunks, completion = finish(broker, claimed)
    assert token_ids_of(chunks) == [token_at(index) for index in range(5)]
    assert (completion.state, completion.metadata) == (State.COMPLETED, {"row": 1})


def test_a_requeued_letter_begins_anew_when_its_tokens_are_dropped(broker):
    letter = bury(broker)
    assert broker.requeue(letter, keep_tokens=False) is State.QUEUED
    claimed = claim_next(broker)
    assert (claimed.num_published, claimed.claim.epoch > 1) == (0, True)
    chunks, completion = finish(broker, claimed)
    assert (len(token_ids_of(chunks)), completion.state) == (5, State.COMPLETED)


def test_a_reader_of_the_first_life_goes_on_with_the_second(broker):
    letter = bury(broker)
    assert broker.read_output({"a": 3})["a"].completion.state is State.FAILED
    broker.requeue(letter, keep_tokens=True)
    assert broker.read_output({"a": 3}) == {}
    claimed = claim_next(broker)
    broker.commit([make_item(claimed.claim, 3, 4)])
    assert [chunk.end for chunk in broker.read_output({"a": 3})["a"].chunks] == [4]


def test_a_letter_is_requeued_once(broker):
    letter = bury(broker)
    assert [broker.requeue(letter, keep_tokens=True) for _ in range(2)] == [State.QUEUED] * 2
    assert sum(broker.queue_depth().values()) == 1


@pytest.mark.parametrize("keep_tokens", [True, False])
def test_a_letter_outlives_the_record_of_its_request(broker, connection, keep_tokens):
    letter = bury(broker, tenant="t", priority="critical", deadline_ms=broker.now_ms() + 99_000)
    before = broker.status("a")
    connection.delete(*broker.keys.of_request("a"))
    assert broker.requeue(letter, keep_tokens=keep_tokens) is State.QUEUED
    after = broker.status("a")
    assert (after.priority, after.deadline_ms) == (before.priority, before.deadline_ms)
    chunks, completion = finish(broker, claim_next(broker))
    assert (len(token_ids_of(chunks)), completion.metadata) == (5, {"row": 1})


def succeed(broker, connection):
    """A letter of `a` whose request is gone, and the claim of a later request of that id."""
    letter = bury(broker)
    connection.delete(*broker.keys.of_request("a"))
    pass_moment(broker)
    return letter, submit_and_claim(broker, id="a", body={"prompt": [7]})


def run_on(broker, claimed):
    return State.RUNNING


def complete(broker, claimed):
    finish(broker, claimed)
    return State.COMPLETED


def reject(broker, claimed):
    broker.fail(claimed.claim, ErrorInfo("invalid_request", "no"), retry=None)
    return State.FAILED


def bury_too(broker, claimed):
    broker.dead_letter(claimed.claim, "tired")
    return State.FAILED


@pytest.mark.parametrize("keep_tokens", [True, False])
@pytest.mark.parametrize("befalls", [run_on, complete, reject, bury_too])
def test_a_later_request_of_the_same_id_is_left_alone(broker, connection, befalls, keep_tokens):
    letter, claimed = succeed(broker, connection)
    state, letters = befalls(broker, claimed), broker.dead_letters()
    before = connection.hgetall(broker.keys.request("a")), read_all(broker, "a")
    with pytest.raises(UnknownRequest, match="is gone, a later one has its id"):
        broker.requeue(letter, keep_tokens=keep_tokens)
    assert (connection.hgetall(broker.keys.request("a")), read_all(broker, "a")) == before
    assert broker.status("a").state is state
    assert broker.dead_letters() == letters


def test_a_request_that_was_requeued_and_is_buried_again_can_be_requeued_again(broker):
    broker.requeue(bury(broker), keep_tokens=True)
    pass_moment(broker)
    for _ in range(2):
        broker.dead_letter(claim_next(broker).claim, "tired")
        (letter,) = broker.dead_letters()
        assert broker.requeue(letter, keep_tokens=True) is State.QUEUED
        # The end of a request is known by its id and the time of its submit.
        pass_moment(broker)
    chunks, _ = finish(broker, claim_next(broker))
    assert token_ids_of(chunks) == [token_at(index) for index in range(5)]


def test_a_letter_nobody_wrote_is_unknown(broker):
    letter = bury(broker)
    with pytest.raises(UnknownRequest, match="no such dead letter"):
        broker.requeue(replace(letter, request_id="other"), keep_tokens=True)


def test_bytes_that_cannot_be_read_today_are_requeued_as_they_are(broker, connection):
    broker.submit(make_request(id="a"))
    connection.set(broker.keys.body("a"), b"\xc1 of another version", keepttl=True)
    claimed = claim_next(broker)
    broker.dead_letter(claimed.claim, "unreadable", error=ErrorInfo("unsupported", "v 2"))
    broker.requeue(broker.dead_letters()[0], keep_tokens=True)
    assert claim_next(broker).request_bytes == b"\xc1 of another version"


def test_a_reason_of_any_length_is_kept_to_its_bound(broker):
    claimed = submit_and_claim(broker, id="a")
    broker.dead_letter(claimed.claim, "why? " * 1000)
    (letter,) = broker.dead_letters()
    assert letter.reason == ("why? " * 1000)[:MAX_REASON_LENGTH]
    assert read_all(broker, "a")[1].error.message == letter.reason


def bounded(script, **bounds):
    """The script with other bounds on what is kept."""
    source = load_source(script)
    for name, value in bounds.items():
        source, changed = re.subn(rf"(local {name} = ).*", rf"\g<1>{value}", source)
        assert changed == 1
    return {script: source}


def bury_many(broker, count):
    for number in range(count):
        claimed = submit_and_claim(broker, id=f"r{number}")
        broker.dead_letter(claimed.claim, "nobody knows")
    return [letter.request_id for letter in broker.dead_letters()]


def test_the_newest_letters_are_kept_within_their_number(make_broker):
    broker = make_broker(sources=bounded("dead_letter", MAX_DEAD_LETTERS=3))
    assert bury_many(broker, 5) == ["r4", "r3", "r2"]


def test_the_newest_letters_are_kept_within_their_bytes(make_broker):
    size = len(make_request(id="r0").encode())
    broker = make_broker(sources=bounded("dead_letter", MAX_DEAD_BYTES=3 * size))
    assert bury_many(broker, 6) == ["r5", "r4", "r3"]


def test_a_letter_that_is_larger_than_all_bytes_allowed_is_kept_alone_until_the_next(make_broker):
    broker = make_broker(sources=bounded("dead_letter", MAX_DEAD_BYTES=1))
    assert bury_many(broker, 3) == ["r2"]


def test_a_letter_that_is_too_old_goes_with_the_next_one(broker, connection):
    bury(broker)
    old = broker.dead_letters()[0]
    ((_, fields),) = connection.xrange(broker.keys.dead)
    week = 7 * 86_400_000
    connection.delete(broker.keys.dead)
    connection.xadd(broker.keys.dead, fields, id=f"{broker.now_ms() - week - 60_000}-0")
    assert [letter.original for letter in broker.dead_letters()] == [old.original]
    assert bury_many(broker, 1) == ["r0"]


def test_the_last_letters_expire_without_another(broker, connection):
    bury(broker)
    assert 6 * 86_400 < connection.ttl(broker.keys.dead) <= 7 * 86_400


def test_bytes_count_anew_once_no_letter_is_left(make_broker):
    size = len(make_request(id="r0").encode())
    broker = make_broker(sources=bounded("dead_letter", MAX_DEAD_BYTES=2 * size))
    bury_many(broker, 2)
    for letter in broker.dead_letters():
        broker.requeue(letter, keep_tokens=False)
        broker.cancel(letter.request_id)
    read = broker.peek(count=9, block_seconds=0)
    assert not any(answer.ended for answer in broker.claim(read))
    broker.submit_many([make_request(id=name) for name in ("x0", "x1")])
    for _ in range(2):
        broker.dead_letter(claim_next(broker).claim, "nobody knows")
    assert [letter.request_id for letter in broker.dead_letters()] == ["x1", "x0"]
