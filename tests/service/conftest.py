"""One real Redis for all tests of the service; each test has a queue of its own in it."""

from collections.abc import Iterator

import pytest

from quire.local_redis import LocalRedis
from tests.service.builders import Clock, Queue


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
