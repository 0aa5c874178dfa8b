"""A worker with a fake model, a gateway with a folder for files, and OpenAI's client."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

from tests.service.builders import Queue, StepGate, WorkerThread
from tests.service.gateway.builders import GatewayThread, gateway_of, openai_client


@dataclass(frozen=True)
class Front:
    """One queue with a gateway. Its worker runs if the fixture says so."""

    queue: Queue
    folder: Path
    gateway: GatewayThread
    openai: OpenAI


def front_of(queue: Queue, folder: Path, **settings: object) -> Iterator[Front]:
    with (
        gateway_of(queue, files_folder=folder, **settings) as gateway,
        openai_client(gateway.url) as openai,
    ):
        yield Front(queue, folder, gateway, openai)


@pytest.fixture
def front(queue: Queue, tmp_path: Path) -> Iterator[Front]:
    yield from front_of(queue, tmp_path / "files")


@pytest.fixture
def gate() -> StepGate:
    """The steps that a gated worker may make."""
    return StepGate(steps=0)


@pytest.fixture
def gated_worker(queue: Queue, gate: StepGate) -> Iterator[WorkerThread]:
    """A worker that cannot end a batch before its test lets it."""
    with WorkerThread(queue.settings(max_num_seqs=16), before_run=gate) as worker:
        yield worker
        gate.open()


@pytest.fixture
def worker(queue: Queue) -> Iterator[WorkerThread]:
    with WorkerThread(queue.settings(max_num_seqs=16)) as worker:
        yield worker
