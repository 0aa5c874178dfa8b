"""What moves on is not given up, and what comes back is served first."""

import pytest

from quire.queue.claim.claim import NotClaimed
from quire.queue.lease.lease import BackOff
from quire.wire.output import ErrorInfo, State
from quire.wire.protocol import Priority
from tests.quire.builders import (
    claim_next,
    make_item,
    make_request,
    read_all,
    submit_and_claim,
    token_at,
    token_ids_of,
)

BROKEN = ErrorInfo("device_failed", "the device is gone")


def lose(broker, clockwork, claimed):
    """The worker dies and the lease runs out."""
    clockwork.expire_lease(claimed.claim.request_id)
    (reaped,) = broker.reap()
    return reaped.state


def read_ids(broker, *, count=10):
    entries = broker.peek(count=count, block_seconds=0)
    return [entry.request_id for entry in entries]


def test_a_request_that_moves_on_with_every_claim_is_never_given_up(make_broker, clockwork):
    broker = make_broker(max_attempts=2)
    broker.submit(make_request(id="a"))
    for index in range(6):
        claimed = claim_next(broker)
        assert claimed.attempts == 1
        broker.commit([make_item(claimed.claim, index, index + 1)])
        assert lose(broker, clockwork, claimed) is State.QUEUED
    last = claim_next(broker)
    broker.commit([make_item(last.claim, 6, 7, final=True)])
    chunks, completion = read_all(broker, "a")
    assert token_ids_of(chunks) == [token_at(index) for index in range(7)]
    assert (completion.state, completion.resumes) == (State.COMPLETED, 6)
    assert broker.dead_letters() == []


def test_a_request_that_stands_still_is_given_up_though_it_has_moved_before(make_broker, clockwork):
    broker = make_broker(max_attempts=2)
    moved = submit_and_claim(broker, id="a")
    broker.commit([make_item(moved.claim, 0, 3)])
    assert lose(broker, clockwork, moved) is State.QUEUED
    assert [lose(broker, clockwork, claim_next(broker)) for _ in range(2)] == [
        State.QUEUED,
        State.FAILED,
    ]
    assert [letter.reason for letter in broker.dead_letters()] == ["attempts_spent"]


def lost_after(broker, clockwork, *numbers):
    """Claims and loses the next request again and again; returns how long each was on trial.

    With so many new tokens published each time; None gives the claim back in place of losing it.
    """
    trials = []
    for number in numbers:
        claimed = claim_next(broker)
        trials.append(claimed.trial_tokens)
        if number is None:
            assert broker.release([claimed.claim]) == [True]
        else:
            start = claimed.num_published
            if number > 0:
                broker.commit([make_item(claimed.claim, start, start + number)])
            assert lose(broker, clockwork, claimed) is State.QUEUED
    return trials


#: The new tokens of claims that were lost one after the other, and the trial of each. None: it was
#: given back.
LOSSES = {
    "nothing published": ([0, 0, 0, 0], [0, 1, 64, 64]),
    "a little each time": ([2, 2, 2, 2], [0, 0, 64, 64]),
    "nothing at first": ([0, 2, 2], [0, 1, 64]),
    "acquitted in between": ([2, 64, 2, 2, 2], [0, 0, 0, 0, 64]),
    "acquitted after all": ([2, 2, 64, 2], [0, 0, 64, 0]),
    "not far enough": ([2, 63, 2], [0, 0, 64]),
    "given back in between": ([2, None, 2, None, 2], [0, 0, 0, 64, 64]),
}


@pytest.mark.parametrize(("numbers", "trials"), LOSSES.values(), ids=LOSSES)
def test_who_loses_its_workers_again_and_again_is_on_trial_though_it_gets_on(
    broker, clockwork, numbers, trials
):
    broker.submit(make_request(id="a"))
    assert lost_after(broker, clockwork, *numbers) == trials


def test_who_got_on_twice_and_lost_its_worker_goes_behind_the_others_of_its_class(
    broker, clockwork
):
    broker.submit(make_request(id="a"))
    lost_after(broker, clockwork, 2)
    broker.submit(make_request(id="b"))
    # In front of it at first: one loss says little.
    lost_after(broker, clockwork, 2)
    broker.submit(make_request(id="c"))
    assert read_ids(broker) == ["b", "a", "c"]


def test_a_suspect_that_failed_comes_back_behind_the_others_of_its_class(broker, clockwork):
    broker.submit(make_request(id="a"))
    lost_after(broker, clockwork, 2, 2)
    claimed = claim_next(broker)
    assert broker.fail(claimed.claim, BROKEN, retry=BackOff()) is State.SCHEDULED
    broker.submit(make_request(id="b"))
    clockwork.expire_delay("a")
    broker.promote()
    assert read_ids(broker) == ["b", "a"]


def test_a_new_life_of_a_dead_letter_is_no_suspect(make_broker, clockwork):
    broker = make_broker(max_attempts=2)
    broker.submit(make_request(id="a"))
    lost_after(broker, clockwork, 2, 2, 0)
    assert lose(broker, clockwork, claim_next(broker)) is State.FAILED
    (letter,) = broker.dead_letters()
    broker.requeue(letter, keep_tokens=True)
    assert claim_next(broker).trial_tokens == 0


def test_a_failed_attempt_that_moved_on_is_not_counted_either(make_broker, clockwork):
    broker = make_broker(max_attempts=1)
    broker.submit(make_request(id="a"))
    for index in range(3):
        claimed = claim_next(broker)
        broker.commit([make_item(claimed.claim, index, index + 1)])
        assert broker.fail(claimed.claim, BROKEN, retry=BackOff()) is State.SCHEDULED
        clockwork.expire_delay("a")
        broker.promote()
    assert broker.fail(claim_next(broker).claim, BROKEN, retry=BackOff()) is State.FAILED


def test_a_replayed_commit_is_no_progress(make_broker, clockwork):
    broker = make_broker(max_attempts=1)
    first = submit_and_claim(broker, id="a")
    broker.commit([make_item(first.claim, 0, 3)])
    lose(broker, clockwork, first)
    second = claim_next(broker)
    assert broker.commit([make_item(second.claim, 0, 3)])[0].status == "replayed"
    assert lose(broker, clockwork, second) is State.FAILED


@pytest.mark.parametrize("way", ["reaped", "released"])
def test_a_request_with_tokens_comes_back_before_the_new_ones_of_its_class(broker, clockwork, way):
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 1)])
    broker.submit_many([make_request(id=name) for name in "bc"])
    if way == "reaped":
        lose(broker, clockwork, claimed)
    else:
        broker.release([claimed.claim])
    assert read_ids(broker) == ["a", "b", "c"]


def test_a_failed_attempt_with_tokens_comes_back_before_the_new_ones(broker, clockwork):
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 1)])
    broker.submit(make_request(id="b"))
    broker.fail(claimed.claim, BROKEN, retry=BackOff())
    clockwork.expire_delay("a")
    broker.promote()
    assert read_ids(broker) == ["a", "b"]


def test_a_request_that_was_given_back_before_its_first_token_keeps_its_place(broker):
    claimed = submit_and_claim(broker, id="a")
    broker.submit(make_request(id="b"))
    broker.release([claimed.claim])
    assert read_ids(broker) == ["a", "b"]


def test_what_a_worker_may_have_died_of_goes_behind_the_others(broker, clockwork):
    claimed = submit_and_claim(broker, id="a")
    broker.submit(make_request(id="b"))
    lose(broker, clockwork, claimed)
    assert read_ids(broker) == ["b", "a"]


def test_what_comes_back_is_not_more_urgent_than_a_better_class(broker):
    claimed = submit_and_claim(broker, id="low", priority="low")
    broker.submit_many([make_request(id=name, priority=name) for name in ("high", "normal")])
    broker.submit(make_request(id="low2", priority="low"))
    broker.release([claimed.claim])
    assert read_ids(broker) == ["high", "normal", "low", "low2"]


def test_what_came_back_has_a_ticket_like_any_other(broker, connection):
    claimed = submit_and_claim(broker, id="a", priority="high")
    broker.release([claimed.claim])
    assert broker.queue_depth()[Priority.HIGH] == 1
    assert connection.xlen(broker.keys.ingress(Priority.HIGH)) == 1
    claim_next(broker)
    assert not any(connection.xlen(stream) for stream in broker.keys.all_ingress)


def test_a_claim_of_a_paused_queue_changes_nothing(broker, connection):
    broker.submit(make_request(id="a"))
    candidates = broker.peek(count=1, block_seconds=0)
    broker.pause()
    assert broker.claim(candidates) == [NotClaimed("a", "paused")]
    broker.resume()
    assert broker.peek(count=1) == candidates
    assert connection.xlen(broker.keys.ingress(Priority.NORMAL)) == 1


def test_a_waiting_reader_wakes_for_what_comes_back(broker):
    claimed = submit_and_claim(broker, id="a")
    broker.release([claimed.claim])
    (entry,) = broker.peek(count=1, block_seconds=1.0)
    assert entry.request_id == "a"
