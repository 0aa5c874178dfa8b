"""Many waiting reads in few: what is read, and who gets which part of it."""

import traceback

import pytest

from quire.errors import BrokerUnavailable, ProtocolError, QuireError
from quire.queue.publish.output_log import OutputRead
from quire.queue.publish.waits import MAX_STREAMS_PER_READ, Wait, Waits
from quire.wire.codec import pack_ids
from quire.wire.output import Completion, FinishReason, State


class Waiting:
    """A wait that counts how often it was woken."""

    def __init__(self, waits: Waits, **seen: int) -> None:
        self.num_woken = 0
        self.wait = Wait(seen, self._wake)
        waits.add(self.wait)

    def _wake(self) -> None:
        self.num_woken += 1

    def starts(self) -> dict[str, int]:
        return {name: read.chunks[0].start for name, read in self.wait.news.items()}


def five_tokens(start: int) -> OutputRead:
    ids = pack_ids([1, 2, 3, 4, 5])
    fields = {b"from": b"%d" % start, b"ids": ids, b"text": b"abcde", b"ends": ids}
    return OutputRead("a", [(b"%d-1" % (start + 4), fields)], seen=start)


def test_a_log_is_read_for_the_one_who_has_least_of_it_and_each_gets_what_it_lacks():
    waits = Waits()
    ahead, behind = Waiting(waits, a=4), Waiting(waits, a=2, b=9)
    assert waits.groups() == [{"a": 2, "b": 9}]
    waits.deliver({"a": five_tokens(2)}, {"a": 2})
    assert (ahead.starts(), behind.starts()) == ({"a": 4}, {"a": 2})
    assert (ahead.num_woken, behind.num_woken) == (1, 1)
    assert not waits


def test_news_that_one_of_two_has_already_wakes_the_other_only():
    waits = Waits()
    ahead, behind = Waiting(waits, a=7), Waiting(waits, a=2)
    waits.deliver({"a": five_tokens(2)}, {"a": 2})
    assert (ahead.num_woken, behind.num_woken) == (0, 1)
    assert waits.groups() == [{"a": 7}]


def test_an_end_before_a_readers_place_is_no_news_for_it():
    waits = Waits()
    beyond, there = Waiting(waits, a=4), Waiting(waits, a=3)
    end = Completion("a", State.COMPLETED, FinishReason.LENGTH)
    waits.deliver({"a": OutputRead("a", [(b"3-1", {b"done": end.encode()})], seen=3)}, {"a": 3})
    assert (beyond.num_woken, there.num_woken) == (0, 1)
    assert there.wait.news["a"].completion.usage.completion_tokens == 3


def test_who_came_during_a_read_and_has_less_than_it_waits_for_the_next():
    waits = Waits()
    ahead = Waiting(waits, a=7)
    (after,) = waits.groups()
    behind, other = Waiting(waits, a=5), Waiting(waits, a=7)
    waits.deliver({"a": five_tokens(7)}, after)
    # Told of what begins at 7, it would take tokens 5 and 6 for lost.
    assert (ahead.starts(), other.starts(), behind.starts()) == ({"a": 7}, {"a": 7}, {})
    assert behind.num_woken == 0
    assert waits.groups() == [{"a": 5}]


def test_one_read_takes_no_more_logs_than_its_limit():
    waits = Waits()
    names = [f"r{number}" for number in range(2 * MAX_STREAMS_PER_READ + 1)]
    Waiting(waits, **dict.fromkeys(names, 0))
    groups = waits.groups()
    assert [len(group) for group in groups] == [MAX_STREAMS_PER_READ, MAX_STREAMS_PER_READ, 1]
    assert [name for group in groups for name in group] == names


@pytest.mark.parametrize("kind", [BrokerUnavailable, ProtocolError])
def test_an_error_tells_each_who_waited_its_own_way_and_the_same_cause(kind):
    waits, cause = Waits(), ConnectionError("gone")
    waitings = [Waiting(waits, a=0) for _ in range(3)]
    error = kind("away")
    error.__cause__ = cause
    if isinstance(error, ProtocolError):
        waits.deliver({"a": error}, {"a": 0})
    else:
        waits.fail(error)
    raised = [raised_by(waiting) for waiting in waitings]
    assert [(type(one), str(one), one.__cause__) for one in raised] == [(kind, "away", cause)] * 3
    assert [len(traceback.extract_tb(one.__traceback__)) for one in raised] == [1] * 3


def raised_by(waiting: Waiting) -> QuireError:
    try:
        assert waiting.wait.error is not None
        raise waiting.wait.error
    except QuireError as error:
        return error
