"""A gateway with a folder for files, and OpenAI's client for it."""

from collections.abc import Callable, Iterator

import pytest
from openai import OpenAI

from tests.service.gateway.builders import GatewayThread, openai_client


@pytest.fixture
def gateway(start: Callable[..., GatewayThread], tmp_path) -> GatewayThread:
    return start(files_folder=tmp_path / "files")


@pytest.fixture
def openai(gateway: GatewayThread) -> Iterator[OpenAI]:
    with openai_client(gateway.url) as client:
        yield client
