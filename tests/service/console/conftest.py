"""A queue in memory that a test fills by itself, and a console in front of it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.testing.in_memory import FakeQuire
from tests.service.console.builders import ConsoleThread


@pytest.fixture
def fake() -> Iterator[FakeQuire]:
    with FakeQuire() as fake:
        yield fake


@pytest.fixture
def start(fake: FakeQuire) -> Iterator[Callable[..., ConsoleThread]]:
    """Starts consoles of the queue; they end with the test."""
    started: list[ConsoleThread] = []

    def start_one(**settings: Any) -> ConsoleThread:
        started.append(ConsoleThread(fake.connection, **settings).__enter__())
        return started[-1]

    yield start_one
    for console in started:
        console.__exit__()


@pytest.fixture
def console(start: Callable[..., ConsoleThread]) -> ConsoleThread:
    return start()
