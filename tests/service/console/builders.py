"""Consoles for tests, in a thread, and browsers that speak HTTP by themselves."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import redis

from service.console.server import ConsoleServer
from service.console.settings import ConsoleSettings
from tests.service.builders import PATIENCE_SECONDS
from tests.service.gateway.front import Front, Reply, events_of


class ConsoleThread(Front):
    """A whole console inside the test, over the connection it is given."""

    def __init__(self, connection: redis.Redis, **settings: Any) -> None:
        values = {"http_port": 0, "refresh_seconds": 0.1, **settings}
        self.server = ConsoleServer(ConsoleSettings(**values))
        super().__init__(self.server.http_port)
        self._connection = connection
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="console under test")

    def __enter__(self) -> "ConsoleThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the console does not end"

    def page(self, path: str = "", **headers: str) -> Reply:
        """A page of the queue `default`."""
        return self.get(f"/queues/default{path}", **headers)

    @contextlib.contextmanager
    def following(self, path: str, **headers: str) -> Iterator[Iterator[Any]]:
        """The events of an open page."""
        connection = self.send("GET", path, Accept="text/event-stream", **headers)
        with contextlib.closing(connection):
            response = connection.getresponse()
            assert response.status == 200, response.read()
            yield events_of(iter(response.readline, b""))

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self.server.serve(self._connection))
