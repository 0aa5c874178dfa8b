"""What the exporter tells of queues, and when it must tell nothing."""

import json
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from quire.errors import BrokerUnavailable
from quire.queue.broker import Broker
from quire.transport import connection as transport
from quire.transport.connection import connect
from quire.transport.local_redis import LocalRedis
from quire.wire.protocol import GenerationRequest
from service.exporter.queues import Exporter, QueueCollector, Reading
from service.exporter.register import exporter_families
from service.exporter.settings import ExporterSettings
from service.shared.settings.sources import ConfigurationError
from service.worker.observe import register
from tests.service.builders import CHECKOUT, PATIENCE_SECONDS, Queue, eventually, http_get

#: A sample's name and labels.
Series = tuple[str, frozenset[tuple[str, str]]]


def series(name: str, **labels: str) -> Series:
    return name, frozenset(labels.items())


def scrape(exporter: Exporter) -> dict[Series, float]:
    """Every sample the exporter serves."""
    status, text = http_get(exporter.http_port, "/metrics")
    assert status == 200
    return {
        series(sample.name, **sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def start() -> Iterator[Callable[..., Exporter]]:
    """Starts exporters on free ports and stops them after the test."""
    started: list[Exporter] = []

    def start_one(redis_url: str, *queues: str, **settings: Any) -> Exporter:
        values = {
            "redis_url": redis_url,
            "queues": queues,
            "http_port": 0,
            "timeout_seconds": PATIENCE_SECONDS,
            **settings,
        }
        exporter = Exporter(ExporterSettings(**values))
        exporter.start()
        started.append(exporter)
        return exporter

    yield start_one
    for exporter in started:
        exporter.stop()


@pytest.fixture
def hanging_redis() -> Iterator[str]:
    """A server that takes connections and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"redis://127.0.0.1:{server.getsockname()[1]}/0"


def is_up(found: dict[Series, float]) -> bool:
    return found[series("quire_exporter_up")] == 1


def claim_for_long(queue: Queue, *, count: int) -> None:
    """Claims with leases that live until the test has ended, on a busy machine too."""
    broker = Broker(queue.connection, queue=queue.name, lease_seconds=600.0)
    assert len(broker.claim(broker.peek(count=count, block_seconds=0))) == count


# -- what it tells ---------------------------------------------------------------------------------


def test_the_memory_of_redis_is_told_with_its_limit_where_the_server_tells(queue: Queue, start):
    connection = connect(queue.url)
    before: Any = connection.config_get("maxmemory")
    connection.config_set("maxmemory", 1 << 40)
    try:
        told = scrape(start(queue.url, queue.name))
        assert told[series("quire_redis_memory_bytes", kind="limit")] == 1 << 40
        assert told[series("quire_redis_memory_bytes", kind="used")] > 100_000
    finally:
        connection.config_set("maxmemory", before["maxmemory"])

    unknown = QueueCollector(lambda: Reading([], memory=None), worker_fresh_seconds=1.0)
    assert "quire_redis_memory_bytes" not in {family.name for family in unknown.collect()}


def test_every_metric_of_the_register_is_exported_and_no_other(queue: Queue, start):
    names = {name for name, _ in scrape(start(queue.url, queue.name))}

    assert names == exporter_families().keys()


def test_every_label_value_exists_from_the_first_scrape(redis_url: str, start):
    found = scrape(start(redis_url, "nobody-was-here", "nor-here"))

    for name, family in exporter_families().items():
        expected = 1
        for label, closed in family.labels.items():
            expected *= 2 if label == "queue" else len(closed) or 1
        assert sum(name == sample for sample, _ in found) == expected, name
    of_the_server = {"quire_exporter_up", "quire_redis_memory_bytes"}
    assert {value for (name, _), value in found.items() if name not in of_the_server} == {0.0}


def test_names_follow_the_rules_of_prometheus_and_are_unlike_the_workers():
    for name, family in exporter_families().items():
        assert re.fullmatch(r"quire_[a-z0-9_]+", name) and family.meaning.endswith(".")
        assert not {"request_id", "user", "error", "worker"} & family.labels.keys()
        is_counter = name.endswith("_total")
        assert is_counter is (family.kind == "counter") is ("tenant" in family.labels)
    assert not exporter_families().keys() & register.families().keys()


def test_a_request_is_counted_where_it_is_from_the_queue_to_its_lease(queue: Queue, start):
    exporter = start(queue.url, queue.name)
    place = {"queue": queue.name, "priority": "high"}
    waiting = series("quire_queue_waiting_requests", queue=queue.name)
    tokens = series("quire_queue_waiting_tokens", queue=queue.name)
    lag = series("quire_queue_lag_messages", **place)
    live = series("quire_queue_leases", queue=queue.name, state="live")

    def seen() -> tuple[float, ...]:
        found = scrape(exporter)
        return found[waiting], found[tokens], found[lag], found[live]

    for _ in range(2):
        queue.submit((1, 2, 3), priority="high", max_tokens=8)
    # Tokens of the prompts, and the most of the answers.
    assert seen() == (2, 2 * (3 + 8), 2, 0)
    claim_for_long(queue, count=1)
    assert seen() == (1, 3 + 8, 1, 1)


def test_ages_are_told_by_what_the_oldest_request_waits_for(queue: Queue, start):
    entered_ms = queue.broker.now_ms() - 600_000
    queue.connection.xadd(queue.keys.ingress(0), {"id": "old"}, id=f"{entered_ms}-0")
    queue.connection.zadd(queue.keys.wait, {"old": entered_ms + 86_400_000})
    exporter = start(queue.url, queue.name)
    name = "quire_queue_oldest_message_age_seconds"
    place = {"queue": queue.name, "priority": "low"}

    assert scrape(exporter)[series(name, **place, state="undelivered")] >= 600
    queue.broker.balance()
    assert scrape(exporter)[series(name, **place, state="undelivered")] == 0


def test_a_lease_nobody_renews_or_reaps_is_told_from_a_live_one(queue: Queue, start):
    ids = [queue.submit(), queue.submit(), queue.submit()]
    claim_for_long(queue, count=3)
    queue.connection.zadd(queue.keys.lease, {ids[0]: 1})

    found = scrape(start(queue.url, queue.name))
    assert found[series("quire_queue_leases", queue=queue.name, state="expired")] == 1
    assert found[series("quire_queue_leases", queue=queue.name, state="live")] == 2


def test_a_scheduled_request_that_is_due_is_told_from_one_that_waits(queue: Queue, start):
    later_ms = queue.broker.now_ms() + 3_600_000
    ids = [queue.submit(not_before_ms=later_ms) for _ in range(3)]
    queue.connection.zadd(queue.keys.delay, {ids[0]: 1})

    found = scrape(start(queue.url, queue.name))
    name = "quire_queue_scheduled_messages"
    assert found[series(name, queue=queue.name, state="due")] == 1
    assert found[series(name, queue=queue.name, state="waiting")] == 2


def test_a_pause_of_any_shard_is_told(queue: Queue, start):
    exporter = start(queue.url, queue.name, num_shards=2)
    paused = series("quire_queue_paused", queue=queue.name)
    assert scrape(exporter)[paused] == 0

    Broker(queue.connection, queue=queue.name, shard=1).pause("maintenance")
    assert scrape(exporter)[paused] == 1


def test_consumers_are_workers_that_are_ready_and_are_pending_lately(queue: Queue, start):
    for name, state in (("w1", "ready"), ("w2", "ready"), ("w3", "draining"), ("w4", "stopped")):
        queue.broker.beat_worker(name, state, {})
    long_ago = queue.broker.now_ms() - 31_000
    queue.connection.hset(queue.keys.workers, "silent", f"{long_ago} ready ".encode() + b"\x80")

    found = scrape(start(queue.url, queue.name, worker_fresh_seconds=30.0))
    assert found[series("quire_queue_consumers", queue=queue.name)] == 2


def test_dead_letters_are_told(queue: Queue, start):
    queue.submit()
    (claimed,) = queue.broker.claim(queue.broker.peek(count=1, block_seconds=0))
    queue.broker.dead_letter(claimed.claim, "undecodable")

    found = scrape(start(queue.url, queue.name))
    assert found[series("quire_dead_letter_messages", queue=queue.name)] == 1


def test_one_exporter_tells_of_several_queues(queue: Queue, start):
    queue.submit()
    found = scrape(start(queue.url, "empty", queue.name))

    name = "quire_queue_lag_messages"
    assert found[series(name, queue=queue.name, priority="normal")] == 1
    assert found[series(name, queue="empty", priority="normal")] == 0


def test_shards_of_a_queue_are_one_queue(queue: Queue, start):
    other = Broker(queue.connection, queue=queue.name, shard=1)
    queue.submit()
    other.submit(GenerationRequest(kind="tokens", body={"prompt": [1]}))
    # A worker of both shards is one worker.
    for broker in (queue.broker, other):
        broker.beat_worker("w", "ready", {})

    entered_ms = queue.broker.now_ms() - 600_000
    queue.connection.xadd(other.keys.ingress(0), {"id": "old"}, id=f"{entered_ms}-0")
    queue.submit(priority="low")

    found = scrape(start(queue.url, queue.name, num_shards=2))
    place = {"queue": queue.name, "priority": "normal"}
    assert found[series("quire_queue_lag_messages", **place)] == 2
    oldest = {"queue": queue.name, "priority": "low", "state": "undelivered"}
    assert found[series("quire_queue_oldest_message_age_seconds", **oldest)] >= 600
    assert found[series("quire_queue_consumers", queue=queue.name)] == 1


# -- when it tells nothing -------------------------------------------------------------------------


def test_a_redis_that_goes_away_leaves_no_old_number_and_comes_back_by_itself(tmp_path, start):
    with LocalRedis.start(append_only=True) as server:
        if not server.is_real:
            pytest.skip("no real Redis to kill")
        name = f"test-{uuid.uuid4().hex[:8]}"
        exporter = start(server.url, name)
        assert scrape(exporter)[series("quire_exporter_up")] == 1

        server.kill()
        assert scrape(exporter) == {series("quire_exporter_up"): 0}
        assert http_get(exporter.http_port, "/livez")[0] == 200

        server.restart()
        eventually(lambda: len(found := scrape(exporter)) > 1 and is_up(found))


def test_a_redis_that_hangs_does_not_hang_the_scrape(hanging_redis: str, start, monkeypatch):
    # The sockets alone wait for longer than the scrape, which would fail.
    monkeypatch.setattr(transport, "SOCKET_MARGIN_SECONDS", 2 * PATIENCE_SECONDS)
    exporter = start(hanging_redis, "default", timeout_seconds=0.1)

    assert scrape(exporter) == {series("quire_exporter_up"): 0}
    assert http_get(exporter.http_port, "/livez")[0] == 200


def test_keys_that_are_not_ours_are_told_like_a_redis_that_is_away(queue: Queue, start):
    exporter = start(queue.url, queue.name)
    queue.connection.set(queue.keys.dead, "not a stream", ex=60)
    assert scrape(exporter) == {series("quire_exporter_up"): 0}

    queue.connection.delete(queue.keys.dead)
    assert scrape(exporter)[series("quire_exporter_up")] == 1


def test_a_stranger_s_line_in_the_registry_hides_nothing(queue: Queue, start):
    queue.connection.hset(queue.keys.workers, "stranger", b"1000 ready \xc1")
    queue.submit()
    found = scrape(start(queue.url, queue.name))
    assert found[series("quire_exporter_up")] == 1


def test_going_and_coming_back_are_logged_once_each(capture_events):
    answers = iter([True, False, False, True, True])

    def read() -> Reading:
        if not next(answers):
            raise BrokerUnavailable("connection refused")
        return Reading([])

    collector = QueueCollector(read, worker_fresh_seconds=1.0)
    for _ in range(5):
        list(collector.collect())
    again = ["queues are read", "queues cannot be read", "queues are read"]
    assert capture_events() == again


@pytest.fixture
def capture_events(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """The events that were logged, in order."""
    import structlog

    with structlog.testing.capture_logs() as events:
        monkeypatch.setattr("service.exporter.queues._log", structlog.get_logger())
        yield lambda: [event["event"] for event in events]


def test_registering_reads_nothing():
    def read() -> Reading:
        raise AssertionError("Redis was asked before anybody scraped")

    CollectorRegistry().register(QueueCollector(read, worker_fresh_seconds=1.0))


# -- the process -----------------------------------------------------------------------------------


def test_livez_and_metrics_are_served_and_other_paths_are_404(queue: Queue, start):
    port = start(queue.url, queue.name).http_port

    assert http_get(port, "/livez")[0] == 200
    assert queue.name in http_get(port, "/livez")[1]
    assert http_get(port, "/")[0] == http_get(port, "/readyz")[0] == 404


@pytest.mark.processes
def test_the_process_serves_until_sigterm_and_never_loads_torch(queue: Queue):
    code = (
        "import sys, runpy\n"
        "try: runpy.run_module('service.exporter', run_name='__main__')\n"
        "except SystemExit as end: code = end.code\n"
        "sys.exit(3 if 'torch' in sys.modules else code)\n"
    )
    flags = ["--redis-url", queue.url, "--queues", queue.name, "--http-port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *flags, "--log-format", "json"],
        cwd=CHECKOUT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        port = json.loads(process.stderr.readline())["http_port"]
        assert "quire_exporter_up 1.0" in http_get(port, "/metrics")[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_mistake_in_the_configuration_exits_with_2_and_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "service.exporter", "--queues", "a,b,a"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == "configuration: queues: a queue is named twice\n"


def test_a_taken_port_is_a_mistake_of_the_configuration():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match="another exporter may have it"):
            Exporter(ExporterSettings(http_port=taken.getsockname()[1]))
