"""A real server for the tests that hold the model and the scripts together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from quire.transport.connection import connect
from quire.transport.local_redis import INSTALL_HINT, URL_VARIABLE, LocalRedis


@pytest.fixture(scope="session")
def real_connection() -> Iterator[redis.Redis]:
    with LocalRedis.start() as server:
        if not server.is_real:
            pytest.skip(f"no real Redis: set {URL_VARIABLE}, or {INSTALL_HINT}")
        with connect(server.url) as connection:
            yield connection
