"""OpenAI's client in front of the gateway of a test, and streams of it that are cut."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.service.gateway.builders import GatewayThread, openai_client


@pytest.fixture
def other(start: Callable[..., GatewayThread]) -> Iterator[OpenAI]:
    """The client of a second gateway of the same queue."""
    with openai_client(start().url) as client:
        yield client


@pytest.fixture
def told() -> Callable[[Any], list[dict[str, Any]]]:
    """The events of a stream as they came over the wire."""
    return lambda stream: [event.to_dict() for event in stream]
