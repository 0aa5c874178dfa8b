"""One real Redis for all tests of the service; each test has a queue of its own in it."""

import logging
from collections.abc import Iterator

import pytest
import structlog

from quire.transport.local_redis import LocalRedis
from tests.quire.clusters import cluster  # noqa: F401
from tests.service.builders import Clock, Queue


@pytest.fixture(autouse=True)
def _log_events(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Sends events to `logging` instead of to print.

    Workers and gateways log from threads, and pytest closes its files between the phases of a test:
    CPython 3.11 crashes where `print` is still writing to one (python/cpython#130163).
    """
    caplog.set_level(logging.INFO, logger="service")
    configured = structlog.get_config()
    structlog.configure(logger_factory=structlog.stdlib.LoggerFactory())
    yield
    structlog.configure(**configured)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with LocalRedis.start() as server:
        yield server.url


@pytest.fixture
def queue(redis_url: str) -> Iterator[Queue]:
    queue = Queue.at(redis_url)
    yield queue
    queue.connection.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()
