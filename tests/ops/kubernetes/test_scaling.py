"""Workers that come and go by what waits: from none to four and back, and no token is lost.

KEDA and a cluster cannot run here. The queries, rules, thresholds' kinds and formulas are those of
the manifests, the metrics are those of a real exporter in a real Prometheus, and the workers are
processes.
"""

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from quire.client.client import Client
from quire.transport.local_redis import LocalRedis
from quire.wire.output import State
from service.exporter.queues import Exporter
from service.exporter.settings import ExporterSettings
from tests.chaos.worker import ChaosWorker
from tests.ops.checkout import program
from tests.ops.kubernetes.cluster import of_kind
from tests.ops.kubernetes.scaler import Scaler, Trigger
from tests.ops.stack import Prometheus, running_prometheus
from tests.service.fake_model import eventually, expected_tokens

NUM_REQUESTS, NUM_TOKENS = 96, 30
STEP_SECONDS = 0.03
#: Slots of a worker: fewer than requests per worker by the scaler, so that it takes busy ones away.
SLOTS = 4
#: What one worker is for in this test, by trigger: the load of a test is small.
THRESHOLDS = {"backlog-tokens": 600.0, "oldest-wait": 30.0, "due-requests": 24.0}
COOLDOWN_SECONDS = 1.0
PATIENCE_SECONDS = 90.0


class Fleet:
    """The worker processes, which a scaler starts and drains."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self._flags = ("--redis-url", redis_url, "--max-num-seqs", str(SLOTS))
        # It has no time for what runs, so that every drain of a busy worker releases something.
        self._flags += ("--drain-seconds", "0", "--claim-batch", str(SLOTS))
        self._folder = folder
        self.all: list[ChaosWorker] = []
        self.serving: list[ChaosWorker] = []
        #: How many there were, whenever that changed.
        self.history = [0]

    def scale(self, number: int) -> None:
        """Start workers, or drain one: the manifests take away one at a time."""
        while len(self.serving) < number:
            name = f"worker-{len(self.all)}"
            log = self._folder / f"{name}.log"
            worker = ChaosWorker(self._flags, name=name, log=log, step_seconds=STEP_SECONDS)
            self.all.append(worker)
            self.serving.append(worker)
        if len(self.serving) > number:
            self.serving.pop(0).terminate()
        if len(self.serving) != self.history[-1]:
            self.history.append(len(self.serving))

    def kill(self) -> None:
        for worker in self.all:
            if worker.is_alive:
                worker.kill()


@pytest.fixture
def redis_url() -> Iterator[str]:
    server = LocalRedis.start()
    if not server.is_real:
        pytest.skip("no redis-server or valkey-server: worker processes need one")
    yield server.url
    server.stop()


@pytest.fixture
def prometheus(redis_url: str, tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus with our rules that scrapes an exporter of the server."""
    program("prometheus")
    settings = ExporterSettings(redis_url=redis_url, queues=("default",), http_port=0)
    exporter = Exporter(settings)
    exporter.start()
    with ExitStack() as stack:
        stack.callback(exporter.stop)
        yield stack.enter_context(
            running_prometheus({"quire-exporter": exporter.http_port}, tmp_path)
        )


def shipped_triggers() -> list[Trigger]:
    spec = of_kind("production", "ScaledObject")["quire-worker"]["spec"]
    assert {entry["name"] for entry in spec["triggers"]} == set(THRESHOLDS)
    return [
        dataclasses.replace(Trigger.of(entry), threshold=THRESHOLDS[entry["name"]])
        for entry in spec["triggers"]
    ]


def test_the_shipped_triggers_ask_for_workers_as_keda_does():
    tokens = Trigger("tokens", threshold=20_000, activation=0, is_average=True)
    assert [tokens.wanted(v, now=2) for v in (0, 1, 38_000, 42_000, 45_000, 90_000)] == [
        0, 1, 2, 2, 3, 5,
    ]  # fmt: skip
    wait = Trigger("wait", threshold=30, activation=0, is_average=False)
    assert [wait.wanted(v, now=2) for v in (0, 15, 31, 45, 60)] == [0, 1, 2, 3, 4]


@pytest.mark.distribution
def test_from_none_to_four_workers_and_back_with_nothing_lost(redis_url, prometheus, tmp_path):
    fleet = Fleet(redis_url, tmp_path)

    def value(query: str) -> float:
        # Without a value KEDA changes nothing (`ignoreNullValues`), so wait for the first scrape.
        return eventually(lambda: prometheus.values(query), query)[0]

    scaler = Scaler(shipped_triggers(), value, most=4, cooldown_seconds=COOLDOWN_SECONDS)
    assert scaler.wanted(0) == 0
    pause = threading.Event()
    try:
        with Client(redis_url) as client:
            handles = client.submit_many(
                [
                    {
                        "prompt": [1, 2, number],
                        "sampling": {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": number},
                    }
                    for number in range(1, NUM_REQUESTS + 1)
                ]
            )

            def is_over() -> bool:
                fleet.scale(scaler.wanted(len(fleet.serving)))
                pause.wait(0.3)
                return len(fleet.history) > 1 and not fleet.serving

            eventually(is_over, "scaled to none again", seconds=PATIENCE_SECONDS)
            results = [handle.result(timeout=PATIENCE_SECONDS) for handle in handles]
        ends = [worker.wait(PATIENCE_SECONDS) for worker in fleet.all]
    finally:
        fleet.kill()

    assert max(fleet.history) == 4 and fleet.history[-1] == 0
    assert [result.state for result in results] == [State.COMPLETED] * NUM_REQUESTS
    for number, result in enumerate(results, start=1):
        wanted = expected_tokens([1, 2, number], max_tokens=NUM_TOKENS, seed=number)
        assert tuple(result.token_ids) == wanted
    # Every worker ended by itself, and those that were busy gave back what they had.
    assert set(ends) == {0}
    released = sum(len(worker.events("request released")) for worker in fleet.all)
    assert released > 0
    assert sum(result.resumes for result in results) > 0
