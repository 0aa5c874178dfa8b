"""Gateways for tests, in a thread or a process, and what is asked of them."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from openai import OpenAI

from quire.client.client_async import AsyncClient
from quire.records import State
from quire.testing.in_memory import FakeQuire
from service.gateway.server import GatewayServer
from service.gateway.settings import GatewaySettings
from tests.service.builders import PATIENCE_SECONDS, Queue, eventually
from tests.service.gateway.front import Front
from tests.service.processes import LoggedProcess


def state_of(fake: FakeQuire, request_id: str) -> State:
    return fake.broker.status(request_id).state


def wait_until_cancelled(fake: FakeQuire, *request_ids: str) -> None:
    for request_id in request_ids:
        eventually(lambda id_=request_id: state_of(fake, id_) == "cancelled", "cancelled")


class GatewayThread(Front):
    """A whole gateway inside the test, over the client that `make_client` gives to its loop."""

    def __init__(self, make_client: Callable[[], AsyncClient], **settings: Any) -> None:
        self.server = GatewayServer(GatewaySettings(**{"http_port": 0, **settings}))
        super().__init__(self.server.http_port)
        self._make_client = make_client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="gateway under test")

    def __enter__(self) -> "GatewayThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.stop()
            self.stop()
        self.join()

    def stop(self) -> None:
        """What SIGTERM does."""
        self._loop.call_soon_threadsafe(self.server.stop)

    def wait_for_hang_up(self, outcome: str) -> float:
        """Wait until the gateway has noticed that a caller has gone; returns how many have."""
        name = "quire_gateway_hang_ups_total"
        return eventually(lambda: self.metric(name, outcome=outcome), f"a hang up: {outcome}")

    def join(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the gateway does not end"

    def _run(self) -> None:
        async def serve() -> None:
            async with self._make_client() as client:
                await self.server.serve(client)

        with contextlib.closing(self._loop):
            self._loop.run_until_complete(serve())


def gateway_of(queue: Queue, **settings: Any) -> GatewayThread:
    """A gateway in front of a queue on a real Redis."""
    return GatewayThread(lambda: AsyncClient(queue.url, queue=queue.name), **settings)


def openai_client(url: str, *, max_retries: int = 0, **others: Any) -> OpenAI:
    """OpenAI's own client of a gateway without keys."""
    return OpenAI(base_url=url, api_key="unused", max_retries=max_retries, **others)


class GatewayProcess(LoggedProcess, Front):
    """`python -m service.gateway` in a process of its own, once it is ready."""

    def __init__(self, queue: Queue, *flags: str) -> None:
        where = ("--redis-url", queue.url, "--queue", queue.name)
        LoggedProcess.__init__(self, "service.gateway", *where, *flags)
        Front.__init__(self, self.wait_for_event("gateway ready")["http_port"])
