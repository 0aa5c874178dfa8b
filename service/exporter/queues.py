"""Exports the state of queues to Prometheus, one process for all workers.

Run it with `python -m service.exporter`. Every scrape reads its numbers from Redis. When Redis does
not answer in time, the scrape contains only `quire_exporter_up 0`: an old backlog would look like a
current one.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import redis
import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.errors import BrokerUnavailable, QuireError
from quire.keys import Keys
from quire.queue.view.inspection import ServerMemory, inspect_memory
from quire.queue.view.view import Part, QueueView, view_queues
from quire.transport.connection import connect
from service.exporter.register import exporter_families
from service.exporter.settings import ExporterSettings
from service.exporter.usage import UsageCounter, Used
from service.shared.families import PRIORITIES
from service.shared.probes import ProbeServer

#: What the tenants of every queue have used.
UsageOfQueues = Mapping[str, Mapping[str, Used]]


@dataclass(frozen=True, slots=True)
class Reading:
    """What one scrape has read from Redis. `memory` is None if the user may not read it."""

    views: Sequence[QueueView]
    memory: ServerMemory | None = None
    usage: UsageOfQueues = field(default_factory=dict)


#: The values of the labels, in the order of the register, and the value.
Sample = tuple[Sequence[str], float]
#: A number of a queue.
Number = Callable[[QueueView], float]

#: The metrics with one number for each state of something in a queue.
_BY_STATE: Mapping[str, Mapping[str, Number]] = {
    "quire_queue_scheduled_messages": {
        "waiting": lambda view: view.rest("num_scheduled", "num_due"),
        "due": lambda view: view.total("num_due"),
    },
    "quire_queue_leases": {
        "live": lambda view: view.rest("num_leases", "num_expired_leases"),
        "expired": lambda view: view.total("num_expired_leases"),
    },
    "quire_queue_batches": {
        "held": lambda view: sum(one.open - one.free for one in view.batches),
        "free": lambda view: sum(one.free for one in view.batches),
    },
    "quire_queue_tenants": {
        "open": lambda view: view.shared.num_tenants,
        "limited": lambda view: view.shared.num_limited,
    },
}

_log = structlog.get_logger("service.exporter")


class Exporter:
    """One exporter. After `start` it answers scrapes, until `stop`.

    Raises:
        ConfigurationError: it cannot listen on the address.
    """

    def __init__(self, settings: ExporterSettings) -> None:
        connection = connect(settings.connection_url, block_seconds=0.0)
        self._read = BoundedRead(
            Inspection(connection, settings).read, seconds=settings.timeout_seconds
        )
        registry = CollectorRegistry()
        registry.register(
            QueueCollector(self._read, worker_fresh_seconds=settings.worker_fresh_seconds)
        )
        self._server = ProbeServer(
            registry,
            # The exporter has no loop that could hang: it is alive if it answers. It must not check
            # Redis: it would be restarted for an outage that only it can report.
            {"/livez": lambda: (True, {"queues": list(settings.queues)})},
            host=settings.http_host,
            port=settings.http_port,
            kind="exporter",
        )

    @property
    def http_port(self) -> int:
        """The port it listens on."""
        return self._server.port

    def start(self) -> None:
        """Answer from now on."""
        self._server.start()

    def stop(self) -> None:
        """Close the port. Does not wait for a read that Redis has not answered."""
        self._server.stop()
        self._read.close()


class QueueCollector(Collector):
    """Calls `read` at every scrape; when that fails, it exports only `quire_exporter_up 0`."""

    def __init__(self, read: Callable[[], Reading], *, worker_fresh_seconds: float) -> None:
        self._read = read
        self._fresh_seconds = worker_fresh_seconds
        self._is_up: bool | None = None

    def describe(self) -> Iterable[Metric]:
        """The metrics without values: registering must not wait for Redis."""
        return [_metric(name, ()) for name in exporter_families()]

    def collect(self) -> Iterator[Metric]:
        """All metrics of the register, or only the first if the queues cannot be read."""
        try:
            reading = self._read()
        except QuireError as error:
            self._note(is_up=False, error=str(error))
            yield _metric("quire_exporter_up", [((), 0.0)])
            return
        self._note(is_up=True)
        views = reading.views
        yield _metric("quire_exporter_up", [((), 1.0)])
        if reading.memory is not None:
            used, limit = reading.memory.used_bytes, reading.memory.limit_bytes
            yield _metric("quire_redis_memory_bytes", [(("used",), used), (("limit",), limit)])
        for name, number in self._by_queue().items():
            yield _metric(name, [((view.name,), number(view)) for view in views])
        for name, numbers in _BY_STATE.items():
            yield _metric(
                name,
                [((v.name, state), of(v)) for v in views for state, of in numbers.items()],
            )
        yield _metric("quire_queue_lag_messages", _by_class(views, "num_undelivered"))
        yield _metric(
            "quire_queue_oldest_message_age_seconds",
            _by_class(views, "undelivered_seconds", "undelivered"),
        )
        yield _metric(
            "quire_queue_tenant_ahead_tokens",
            [
                ((view.name, name), ahead)
                for view in views
                for name, ahead in zip(PRIORITIES, view.shared.ahead_tokens, strict=True)
            ],
        )
        yield from _of_usage(reading)

    def _by_queue(self) -> Mapping[str, Number]:
        """The metrics with one number for each queue."""
        return {
            "quire_queue_waiting_requests": lambda view: view.total("num_queued"),
            "quire_queue_waiting_tokens": lambda view: view.total("num_waiting_tokens"),
            "quire_queue_paused": lambda view: view.is_paused,
            "quire_queue_consumers": lambda view: view.num_ready(within=self._fresh_seconds),
            "quire_dead_letter_messages": lambda view: view.total("num_dead_letters"),
            "quire_queue_shared_by_tokens": lambda view: view.shared.by_tokens,
        }

    def _note(self, *, is_up: bool, **details: str) -> None:
        """Log when reads begin to fail and when they work again, but not at each scrape."""
        if self._is_up is is_up:
            return
        self._is_up = is_up
        if is_up:
            _log.info("queues are read")
        else:
            _log.warning("queues cannot be read", **details)


class BoundedRead:
    """Calls `read` on a separate thread, and waits at most `seconds` for it.

    Socket timeouts limit each step (resolving a name, connecting, the handshake) and not their sum.
    Scrapes during a read share it, so that a hanging Redis occupies one thread only, whatever the
    number of scrapes.
    """

    def __init__(self, read: Callable[[], Reading], *, seconds: float) -> None:
        self._read = read
        self._seconds = seconds
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inspect")
        self._under_way: Future[Reading] | None = None

    def __call__(self) -> Reading:
        """What `read` returns or raises; BrokerUnavailable when it is not done in time."""
        with self._lock:
            if self._under_way is None or self._under_way.done():
                self._under_way = self._executor.submit(self._read)
            future = self._under_way
        try:
            return future.result(self._seconds)
        except TimeoutError:
            raise BrokerUnavailable(f"no answer within {self._seconds:g} s") from None

    def close(self) -> None:
        """Start no more reads; does not wait for the current one."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class Inspection:
    """Reads the state of all shards of all queues. One thread at a time."""

    def __init__(self, connection: redis.Redis, settings: ExporterSettings) -> None:
        self._connection = connection
        self._shards = {
            queue: [Keys(queue, shard) for shard in range(settings.num_shards)]
            for queue in settings.queues
        }
        self._usage = {
            queue: UsageCounter(connection, shards) for queue, shards in self._shards.items()
        }

    def read(self) -> Reading:
        """What one scrape tells. QuireError."""
        connection = self._connection
        views = view_queues(connection, self._shards, Part.SHARDS, Part.SHARING, Part.BATCHES)
        usage = {queue: counter.read() for queue, counter in self._usage.items()}
        return Reading(views, inspect_memory(connection), usage)


def _of_usage(reading: Reading) -> Iterator[Metric]:
    rows = [
        (queue, tenant, used)
        for queue, by_tenant in reading.usage.items()
        # A copy, because the next scrape counts on while a slow one reads.
        for tenant, used in [*by_tenant.items()]
    ]
    yield _metric(
        "quire_queue_tenant_requests_total",
        [((queue, tenant), used.requests) for queue, tenant, used in rows],
    )
    yield _metric(
        "quire_queue_tenant_tokens_total",
        [
            ((queue, tenant, kind), getattr(used, f"{kind}_tokens"))
            for queue, tenant, used in rows
            for kind in exporter_families()["quire_queue_tenant_tokens_total"].labels["kind"]
        ],
    )


def _metric(name: str, samples: Iterable[Sample]) -> Metric:
    family = exporter_families()[name]
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(name, family.meaning, labels=list(family.labels))
    for labels, value in samples:
        metric.add_metric(labels, value)
    return metric


def _by_class(views: Sequence[QueueView], attribute: str, *labels: str) -> list[Sample]:
    return [
        ((view.name, name, *labels), getattr(one, attribute))
        for view in views
        for name, one in zip(PRIORITIES, view.classes, strict=True)
    ]
