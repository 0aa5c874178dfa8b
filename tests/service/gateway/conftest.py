"""A queue in memory whose worker says what a test tells it to, and a gateway in front of it."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import OpenAI

from quire.testing.in_memory import FakeQuire
from quire.wire.protocol import GenerationRequest
from service.gateway import streaming
from tests.service.builders import PATIENCE_SECONDS
from tests.service.gateway.builders import GatewayThread, openai_client
from tests.service.gateway.front import Reply

#: What the worker has, though it says so in no registry.
ADAPTERS = ("polite", "sql")


class Script:
    """What the worker answers: pieces, each published by itself; `None` waits for `release`."""

    def __init__(self) -> None:
        self.pieces: list[Any] = ["one ", "two ", "three"]
        self.release = threading.Event()

    def __call__(self, request: GenerationRequest) -> Iterator[str]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                assert self.release.wait(PATIENCE_SECONDS), "the test never went on"
            elif callable(piece):
                yield piece(request)
            else:
                yield piece


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def fake(script: Script) -> Iterator[FakeQuire]:
    with FakeQuire(answer=script, adapters=ADAPTERS) as fake:
        fake.broker.beat_worker("w", "ready", {}, model="fake")
        yield fake
        script.release.set()


@pytest.fixture
def worker_held(fake: FakeQuire, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A context in which the worker hears of no cancellation, as between two of its heartbeats."""

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        plain, waits, may_go_on = fake.broker.heartbeat, threading.Event(), threading.Event()

        def heartbeat(*claims: Any) -> Any:
            waits.set()
            assert may_go_on.wait(PATIENCE_SECONDS), "the worker was never let go"
            return plain(*claims)

        monkeypatch.setattr(fake.broker, "heartbeat", heartbeat)
        assert waits.wait(PATIENCE_SECONDS), "the worker runs nothing"
        try:
            yield
        finally:
            may_go_on.set()

    return held


@pytest.fixture
def start(fake: FakeQuire) -> Iterator[Callable[..., GatewayThread]]:
    """Starts gateways of the queue; they end with the test."""
    started: list[GatewayThread] = []

    def start_one(*, max_backlog: int | None = None, **settings: Any) -> GatewayThread:
        gateway = GatewayThread(lambda: fake.async_client(max_backlog=max_backlog), **settings)
        started.append(gateway.__enter__())
        return gateway

    yield start_one
    for gateway in started:
        gateway.__exit__()


@pytest.fixture(scope="module")
def refused() -> Iterator[Callable[..., Reply]]:
    """The answer to a call that never comes to the queue, of a gateway that a module shares."""
    with FakeQuire(answer=Script()) as fake, GatewayThread(fake.async_client) as gateway:
        fake.broker.beat_worker("w", "ready", {}, model="fake")

        def ask(path: str, body: Any, **headers: str) -> Reply:
            reply = gateway.ask("POST", path, body, **headers)
            assert reply.error["type"] == "invalid_request_error"
            assert not fake.requests
            return reply

        yield ask


@pytest.fixture
def patient_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream sends its status with its first event or error, however late a busy machine has it.

    Otherwise the status is 200 after a second, and an error is an event.
    """
    monkeypatch.setattr(streaming, "FIRST_EVENT_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
def client(gateway: GatewayThread) -> Iterator[OpenAI]:
    with openai_client(gateway.url) as client:
        yield client


@pytest.fixture
def gateway(start: Callable[..., GatewayThread]) -> GatewayThread:
    return start()
