"""FAIL, PROMOTE and scheduled requests: a pause that grows, and no attempt before its time."""

from datetime import UTC, datetime

import pytest

from quire import Client
from quire.errors import InvalidRequest
from quire.queue.claim.claim import Claimed, NotClaimed, NotClaimedReason
from quire.queue.lease.lease import BackOff
from quire.queue.lease.moving import Promoted
from quire.queue.request.arguments import call_on
from quire.wire.output import ErrorInfo, FinishReason, State
from tests.quire.builders import (
    claim_next,
    make_item,
    make_request,
    read_all,
    read_and_claim,
    submit_and_claim,
    token_at,
    token_ids_of,
)

BROKEN = ErrorInfo("device_failed", "the device is gone")
SOON = BackOff(first_seconds=10.0, longest_seconds=60.0)


def pause_of(broker, connection, request_id):
    """How many seconds from now a scheduled request is due."""
    return (connection.zscore(broker.keys.delay, request_id) - broker.now_ms()) / 1000


def test_a_failed_attempt_is_tried_again_with_its_tokens_when_it_is_due(broker, clockwork):
    first = submit_and_claim(broker, id="a", priority="high")
    broker.commit([make_item(first.claim, 0, 3)])
    assert broker.fail(first.claim, BROKEN, retry=SOON) is State.SCHEDULED
    assert broker.status("a").state is State.SCHEDULED
    assert broker.promote() == []
    assert broker.peek(count=1, block_seconds=0) == []
    clockwork.expire_delay("a")
    assert broker.promote() == [Promoted("a", State.QUEUED)]
    assert broker.promote() == []
    second = claim_next(broker)
    assert token_ids_of(list(second.published)) == [token_at(index) for index in range(3)]
    assert (second.attempts, second.claim.epoch) == (1, 3)


def set_back(broker, connection):
    """Fails the next attempt; returns the bounds of its pause, in seconds."""
    claim, before = claim_next(broker).claim, broker.now_ms()
    broker.fail(claim, BROKEN, retry=SOON)
    due = connection.zscore(broker.keys.delay, claim.request_id)
    return (due - broker.now_ms()) / 1000, (due - before) / 1000


def test_the_pause_doubles_with_every_attempt_up_to_the_longest(
    broker, connection, clockwork, monkeypatch
):
    monkeypatch.setattr(BackOff, "draw", lambda _: 1000)
    broker.submit(make_request(id="a"))
    for seconds in (10, 20, 40, 60):
        least, most = set_back(broker, connection)
        assert least <= seconds <= most
        clockwork.expire_delay("a")
        broker.promote()


@pytest.mark.parametrize(("drawn", "seconds"), [(0, 5), (500, 7.5), (1000, 10)])
def test_half_of_the_pause_is_certain_and_the_other_half_is_drawn(
    broker, connection, monkeypatch, drawn, seconds
):
    monkeypatch.setattr(BackOff, "draw", lambda _: drawn)
    broker.submit(make_request(id="a"))
    least, most = set_back(broker, connection)
    assert least <= seconds <= most


def test_what_is_drawn_is_anything_from_nothing_to_the_whole():
    drawn = {SOON.draw() for _ in range(1000)}
    assert len(drawn) > 100
    assert drawn <= set(range(1001))


def test_a_claim_that_failed_can_say_nothing_more(broker):
    claimed = submit_and_claim(broker, id="a")
    broker.fail(claimed.claim, BROKEN, retry=SOON)
    assert broker.commit([make_item(claimed.claim, 0, 1)])[0].status == "fenced"
    assert not broker.heartbeat([claimed.claim])[0].alive
    assert broker.release([claimed.claim]) == [True], "it is given back already"
    assert broker.status("a").state is State.SCHEDULED


def test_a_failure_that_is_reported_again_changes_nothing(broker, connection):
    claimed = submit_and_claim(broker, id="a")
    broker.fail(claimed.claim, BROKEN, retry=SOON)
    due = connection.zscore(broker.keys.delay, "a")
    assert broker.fail(claimed.claim, BROKEN, retry=SOON) is State.SCHEDULED
    assert connection.zscore(broker.keys.delay, "a") == due
    assert broker.status("a").attempts == 1


def test_the_failure_of_a_lost_claim_is_fenced(broker, clockwork):
    lost = submit_and_claim(broker, id="a")
    clockwork.expire_lease("a")
    broker.reap()
    claim_next(broker)
    for retry in (None, SOON):
        assert broker.fail(lost.claim, BROKEN, retry=retry) is None
    assert broker.status("a").state is State.RUNNING


def test_an_error_that_would_come_again_ends_the_request_at_once(broker, connection):
    claimed = submit_and_claim(broker, id="a")
    broker.commit([make_item(claimed.claim, 0, 2)])
    for _ in range(2):
        assert broker.fail(claimed.claim, BROKEN) is State.FAILED
    chunks, completion = read_all(broker, "a")
    assert (len(token_ids_of(chunks)), completion.state) == (2, State.FAILED)
    assert (completion.finish_reason, completion.error) == (FinishReason.ERROR, BROKEN)
    assert broker.dead_letters() == []
    assert connection.zcard(broker.keys.lease) == 0


def test_after_the_last_attempt_comes_a_dead_letter_with_the_reason_and_the_bytes(make_broker):
    broker = make_broker(max_attempts=1)
    request = make_request(id="a")
    broker.submit(request)
    claimed = claim_next(broker)
    for _ in range(2):
        assert broker.fail(claimed.claim, BROKEN, retry=SOON) is State.FAILED
    (letter,) = broker.dead_letters()
    assert (letter.reason, letter.attempts) == ("device_failed: the device is gone", 1)
    assert letter.original == request.encode()
    assert read_all(broker, "a")[1].error == BROKEN


def test_a_cancelled_request_is_not_tried_again(broker):
    claimed = submit_and_claim(broker, id="a")
    broker.cancel("a")
    for _ in range(2):
        assert broker.fail(claimed.claim, BROKEN, retry=SOON) is State.CANCELLED
    assert read_all(broker, "a")[1].state is State.CANCELLED


def test_a_scheduled_request_waits_no_longer_than_its_deadline(broker, connection, clockwork):
    claimed = submit_and_claim(broker, id="a", deadline_ms=broker.now_ms() + 2_000)
    broker.fail(claimed.claim, BROKEN, retry=SOON)
    assert pause_of(broker, connection, "a") <= 2
    clockwork.expire_delay("a")
    connection.hset(broker.keys.request("a"), "deadline_ms", "1")
    assert broker.promote() == [Promoted("a", State.EXPIRED)]
    assert read_all(broker, "a")[1].error.code == "deadline_exceeded"


def test_a_request_for_later_is_scheduled_and_queued_when_it_is_due(broker, clockwork):
    request = make_request(id="later", not_before_ms=broker.now_ms() + 60_000)
    assert [broker.submit(request).state for _ in range(2)] == [State.SCHEDULED] * 2
    assert read_and_claim_nothing(broker)
    clockwork.expire_delay("later")
    assert broker.promote() == [Promoted("later", State.QUEUED)]
    assert claim_next(broker).claim.request_id == "later"


def test_a_request_put_off_between_the_look_and_the_promotion_waits_on(
    broker, connection, clockwork, monkeypatch
):
    broker.submit(make_request(id="a", not_before_ms=broker.now_ms() + 60_000))
    clockwork.expire_delay("a")

    def put_off_and_build(keys, request_ids):
        assert request_ids == ["a"], "the sweep has seen that it is due"
        connection.zadd(keys.delay, {"a": broker.now_ms() + 60_000})
        return call_on(keys, request_ids)

    monkeypatch.setattr("quire.queue.lease.moving.call_on", put_off_and_build)
    assert broker.promote() == []
    assert broker.status("a").state is State.SCHEDULED


def read_and_claim_nothing(broker):
    return broker.peek(count=1, block_seconds=0) == []


def test_a_moment_that_has_passed_is_no_delay(broker):
    request = make_request(not_before_ms=broker.now_ms() - 1)
    assert broker.submit(request).state is State.QUEUED


def test_a_request_for_later_lives_until_then_and_its_time_in_the_queue(make_broker, connection):
    broker = make_broker(max_queue_seconds=1000, retention_seconds=100)
    now = broker.now_ms()
    broker.submit_many([
        make_request(id="plain", not_before_ms=now + 5_000_000),
        make_request(id="due", not_before_ms=now + 5_000_000, deadline_ms=now + 5_010_000),
    ])  # fmt: skip
    for request_id, seconds in (("plain", 6100), ("due", 5110)):
        for key in broker.keys.of_request(request_id)[:2]:
            assert seconds - 60 < connection.pttl(key) / 1000 <= seconds


def test_a_scheduled_request_is_cancelled_at_once_and_never_runs(broker, connection, clockwork):
    broker.submit(make_request(id="a", not_before_ms=broker.now_ms() + 60_000))
    claimed = submit_and_claim(broker, id="b")
    broker.fail(claimed.claim, BROKEN, retry=SOON)
    assert [broker.cancel(request_id) for request_id in "ab"] == [State.CANCELLED] * 2
    assert connection.zcard(broker.keys.delay) == 0
    assert broker.promote() == []
    assert [read_all(broker, name)[1].state for name in "ab"] == [State.CANCELLED] * 2


def test_a_scheduled_request_whose_keys_are_gone_is_struck_out(broker, connection, clockwork):
    broker.submit(make_request(id="a", not_before_ms=broker.now_ms() + 60_000))
    connection.delete(*broker.keys.of_request("a"))
    clockwork.expire_delay("a")
    assert broker.promote() == []
    assert connection.exists(broker.keys.delay, broker.keys.open, broker.keys.counts) == 0


def test_a_request_that_waits_for_its_time_gives_no_claim(broker, clockwork):
    claimed = submit_and_claim(broker, id="a")
    broker.fail(claimed.claim, BROKEN, retry=SOON)
    broker.connection.zadd(broker.keys.rank(1), {"a": 1})
    assert read_and_claim(broker) == NotClaimed("a", NotClaimedReason.SCHEDULED)
    clockwork.expire_delay("a")
    broker.promote()
    assert isinstance(read_and_claim(broker), Claimed)


def test_a_client_schedules_by_seconds_or_by_the_moment(broker, connection):
    client = Client(broker)
    by_seconds = client.submit("x", delay_seconds=60, deadline=120)
    moment = datetime.fromtimestamp(broker.now_ms() / 1000 + 60, tz=UTC)
    by_moment = client.submit("x", not_before=moment)
    for handle in (by_seconds, by_moment):
        assert handle.status().state is State.SCHEDULED
        assert 50 < pause_of(broker, connection, handle.request_id) <= 60


@pytest.mark.parametrize("year", [1, 1969, 1970, 2000])
def test_a_moment_that_has_passed_is_now_however_long_ago(broker, year):
    moment = datetime(year, 1, 1, tzinfo=UTC)
    assert Client(broker).submit("x", not_before=moment).status().state is State.QUEUED


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"delay_seconds": 0}, "delay_seconds"),
        ({"delay_seconds": 1e12}, "delay_seconds"),
        ({"delay_seconds": float("nan")}, "delay_seconds"),
        ({"not_before": datetime(2030, 1, 1)}, "not_before"),  # noqa: DTZ001
        ({"not_before": datetime(2030, 1, 1, tzinfo=UTC), "delay_seconds": 1}, "not_before"),
        ({"delay_seconds": 60, "deadline": 60}, "deadline"),
    ],
)
def test_a_time_that_cannot_be_right_is_refused_by_its_name(broker, options, field):
    with pytest.raises(InvalidRequest) as caught:
        Client(broker).submit("x", **options)
    assert caught.value.field == field


@pytest.mark.parametrize(("first", "longest"), [(0, 1), (2, 1), (1, float("inf"))])
def test_a_back_off_that_would_not_end_is_refused(first, longest):
    with pytest.raises(ValueError, match="pauses"):
        BackOff(first, longest)
