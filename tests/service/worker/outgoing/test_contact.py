"""What the log says of an outage: that it begins, that it lasts, and that it is over."""

import contextlib

import pytest
import redis.exceptions
import redis.sentinel
import structlog
from structlog.typing import EventDict

from quire.errors import BrokerUnavailable, QueueFull
from quire.transport.connection import translated
from service.worker.observe.metrics import Metrics
from service.worker.observe.vitals import Vitals
from service.worker.outgoing.contact import REMINDER_SECONDS, Contact
from tests.service.builders import Clock


@pytest.fixture
def contact(clock: Clock) -> Contact:
    metrics = Metrics(model="fake", queue="test")
    vitals = Vitals(stall_timeout_seconds=60.0)
    return Contact(vitals, metrics, silence_seconds=10.0, clock=clock)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch):
    with structlog.testing.capture_logs() as events:
        monkeypatch.setattr("service.worker.outgoing.contact._log", structlog.get_logger())
        yield events


def fails(contact: Contact, operation: str, error: Exception) -> None:
    def away() -> None:
        raise error

    with contextlib.suppress(BrokerUnavailable, QueueFull):
        contact.call(operation, away)


def said(events: list[EventDict]) -> list[tuple[str, str, int]]:
    return [(event["event"], event["operation"], event["calls"]) for event in events]


def test_an_outage_is_said_once_and_so_is_its_end(contact, clock, events):
    for _ in range(20):
        fails(contact, "commit", BrokerUnavailable("refused"))
        clock.now += 1.0
    contact.call("commit", lambda: None)
    contact.call("commit", lambda: None)
    assert said(events) == [("redis unavailable", "commit", 1), ("redis is back", "commit", 20)]
    assert (events[0]["error"], events[1]["away_seconds"]) == ("refused", 20.0)


def test_an_outage_that_lasts_is_said_again_now_and_then(contact, clock, events):
    for _ in range(4):
        fails(contact, "commit", BrokerUnavailable("refused"))
        clock.now += REMINDER_SECONDS / 2
    assert said(events) == [("redis unavailable", "commit", 1), ("redis unavailable", "commit", 3)]


def test_an_operation_that_fails_by_turns_fills_no_disk(contact, clock, events):
    for _ in range(1000):
        fails(contact, "commit", QueueFull("Redis has no memory left", limit="memory"))
        contact.call("commit", lambda: None)
        clock.now += 0.1
    # In a hundred seconds.
    assert len(events) == 2 * 4
    assert [event["event"] for event in events[:2]] == ["redis unavailable", "redis is back"]


def test_an_outage_soon_after_another_is_said_when_it_lasts(contact, clock, events):
    fails(contact, "commit", BrokerUnavailable("refused"))
    contact.call("commit", lambda: None)
    for _ in range(8):
        fails(contact, "commit", BrokerUnavailable("refused"))
        clock.now += REMINDER_SECONDS / 5
    contact.call("commit", lambda: None)
    unavailable, back = "redis unavailable", "redis is back"
    assert said(events) == [
        *((unavailable, "commit", 1), (back, "commit", 1)),
        *((unavailable, "commit", 6), (back, "commit", 8)),
    ]


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (redis.exceptions.ConnectionError(), "connection"),
        (redis.exceptions.BusyLoadingError(), "connection"),
        (redis.sentinel.MasterNotFoundError(), "connection"),
        (redis.exceptions.TimeoutError(), "timeout"),
        (redis.exceptions.AuthenticationError(), "access"),
        (redis.exceptions.NoPermissionError(), "access"),
        (redis.exceptions.ReadOnlyError(), "read_only"),
        (redis.exceptions.MasterDownError("Link is down"), "read_only"),
        (redis.exceptions.OutOfMemoryError(), "memory"),
        (redis.exceptions.ResponseError("MISCONF Errors writing to the AOF file"), "disk"),
        (redis.exceptions.ResponseError(), "other"),
    ],
)
def test_an_outage_is_counted_by_what_somebody_would_have_to_mend(contact, events, cause, kind):
    fails(contact, "commit", translated(cause))
    assert events[0]["kind"] == kind


def test_what_one_operation_cannot_do_is_not_over_because_another_can(contact, events):
    fails(contact, "commit", QueueFull("Redis has no memory left", limit="memory"))
    contact.call("heartbeat", lambda: None)
    assert said(events) == [("redis unavailable", "commit", 1)]
