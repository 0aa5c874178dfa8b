"""How long a scrape waits for Redis, and that scrapes which wait share one read."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from quire.errors import BrokerUnavailable
from service.exporter.queues import BoundedRead
from tests.service.builders import PATIENCE_SECONDS, eventually


def test_scrapes_that_meet_a_hanging_redis_share_one_read():
    calls: list[int] = []
    answer = threading.Event()

    def read() -> dict[str, list[Any]]:
        calls.append(1)
        assert answer.wait(PATIENCE_SECONDS)
        return {}

    bounded = BoundedRead(read, seconds=0.05)
    for _ in range(3):
        with pytest.raises(BrokerUnavailable, match="no answer within"):
            bounded()
    eventually(lambda: calls, "the read has begun")
    assert len(calls) == 1
    answer.set()
    # The next one has the time that a busy machine needs.
    bounded._seconds = PATIENCE_SECONDS
    eventually(lambda: not_refused(bounded) and len(calls) == 2)
    bounded.close()


def not_refused(read: Callable[[], Any]) -> bool:
    try:
        read()
    except BrokerUnavailable:
        return False
    return True
