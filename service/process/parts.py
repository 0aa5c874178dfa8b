"""Builds the parts of a worker and connects them. Starts none of them; `worker` does.

The parts share the Outbox, the Vitals, the Contact, the Metrics and the brokers. All of these are
thread-safe.
"""

from collections.abc import Callable, Mapping
from functools import partial

import redis

from quire.broker.broker import Broker
from quire.wire.protocol import Activity
from service.incoming.compiling import Compiling
from service.incoming.intake import Intake
from service.incoming.origins import QueueClock
from service.incoming.reception import Reception
from service.loop import EngineLoop
from service.model.adapters import announced_adapters
from service.model.served import ServedModel
from service.observe.health import HealthServer
from service.observe.metrics import Metrics
from service.observe.vitals import Vitals
from service.outgoing.contact import Contact
from service.outgoing.leases import Heartbeat, Housekeeper
from service.outgoing.outbox import Outbox
from service.outgoing.publisher import Publisher
from service.outgoing.traces import NoTraces, Traces
from service.process.events import DrainRequested, Event, ModelLoaded, OutboxEmpty, ShardEmpty
from service.settings.bounds import TRY_SECONDS
from service.settings.config import Settings
from service.settings.sources import ConfigurationError


class Parts:
    """The parts of one worker. `complete` builds the intakes, after the model is loaded.

    `report` is called with each event for the main thread.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        load: Callable[[Settings], ServedModel],
        connect: Callable[..., redis.Redis],
        report: Callable[[Event], None],
    ) -> None:
        self._settings = settings
        self._report = report
        self._served: ServedModel | None = None
        self.vitals = Vitals(stall_timeout_seconds=settings.stall_timeout_seconds)
        self.metrics = Metrics(model=settings.model_name, queue=settings.queue)
        self._queue_clock = QueueClock()
        self._contact = Contact(self.vitals, self.metrics, silence_seconds=settings.lease_seconds)
        self.outbox = Outbox(on_empty=lambda: report(OutboxEmpty()))
        # Two connections: commits and heartbeats need a shorter timeout than a blocking read.
        self.connection = connect(settings.connection_url, block_seconds=0.0)
        #: Brokers by shard, for everything except the intakes' reads.
        self.brokers = _brokers(settings, self.connection)
        reading = connect(settings.connection_url, block_seconds=settings.block_seconds)
        #: Brokers by shard, for the intakes.
        self.reading_brokers = _brokers(settings, reading)
        self.loop = EngineLoop(
            partial(load, settings),
            self.outbox,
            vitals=self.vitals,
            metrics=self.metrics,
            on_loaded=lambda served: report(ModelLoaded(served)),
        )
        self.compiling = Compiling(
            self.outbox, engine=self.loop, vitals=self.vitals, settings=settings
        )
        self.traces = _traces(settings)
        self.publisher = Publisher(
            self.brokers,
            self.outbox,
            engine=self.compiling,
            vitals=self.vitals,
            contact=self._contact,
            metrics=self.metrics,
            traces=self.traces,
            interval_seconds=settings.publish_interval_seconds,
            share=settings.publish_share,
        )
        self.heartbeat = Heartbeat(
            self.brokers,
            self.outbox,
            holder=self.publisher,
            vitals=self.vitals,
            contact=self._contact,
            lease_seconds=settings.lease_seconds,
        )
        self.keeper = self._keeper()
        self.health = _health(settings, self.vitals, self.metrics)

    def complete(self, served: ServedModel) -> dict[str, Intake]:
        """Build the parts that need the model: returns thread name -> intake, one for each shard.

        From now on the metrics and the worker registry show this model.
        """
        self._served = served
        self.compiling.serve(served.grammars)
        self.metrics.describe(
            build=served.build, sizes=served.sizes, cache_bytes=served.cache_bytes
        )
        if served.read_memory is not None:
            self.metrics.watch_memory(served.build.get("device", ""), served.read_memory)
        if served.read_threads is not None:
            self.metrics.watch_threads(served.read_threads)
        return {
            f"intake-{shard}": self._intake(shard, broker, served=served)
            for shard, broker in self.reading_brokers.items()
        }

    def _intake(self, shard: int, broker: Broker, *, served: ServedModel) -> Intake:
        reception = Reception(
            broker,
            self.outbox,
            shard=shard,
            loop=self.loop,
            compiling=self.compiling,
            served=served,
            settings=self._settings,
            contact=self._contact,
            metrics=self.metrics,
            queue_clock=self._queue_clock,
        )
        return Intake(
            broker,
            self.outbox,
            reception=reception,
            fingerprint=served.fingerprint,
            policy=served.queue_policy,
            shard=shard,
            num_intakes=len(self.reading_brokers),
            loop=self.loop,
            compiling=self.compiling,
            settings=self._settings,
            vitals=self.vitals,
            contact=self._contact,
            metrics=self.metrics,
            on_queue_empty=partial(self._report, ShardEmpty(shard)),
        )

    def _keeper(self) -> Housekeeper:
        return Housekeeper(
            self.brokers,
            worker=self._settings.worker,
            serves=self._serves,
            policy=self._policy,
            load=self._load,
            on_drain=lambda: self._report(DrainRequested()),
            vitals=self.vitals,
            contact=self._contact,
            metrics=self.metrics,
            lease_seconds=self._settings.lease_seconds,
        )

    def _serves(self) -> tuple[str, Mapping[str, str]]:
        """The model's name and adapters, as the worker registry shows them."""
        settings, served = self._settings, self._served
        adapters = served.adapters if served else announced_adapters(settings.adapters)
        return settings.model_name, adapters

    def _policy(self) -> str:
        """The policy of this worker, as the worker registry shows it."""
        return str(self._served.queue_policy) if self._served else ""

    def _load(self, shard: int) -> dict[str, float]:
        """The worker's load and abilities, as the worker registry of a shard shows them.

        The claims by activity are those of this shard, so that they can be added up.
        """
        counts = self.outbox.num_by_activity(shard)
        load: dict[str, float] = {
            "claims": len(self.outbox.claims()),
            "running": self.loop.num_running,
            "kv_usage": round(self.loop.kv_cache_usage, 3),
            "generated": self.loop.num_generated,
        }
        load |= {str(activity): counts[activity] for activity in Activity}
        return {**load, **(self._served.abilities if self._served else {})}


def _health(settings: Settings, vitals: Vitals, metrics: Metrics) -> HealthServer:
    """The health server. Also adds the worker's state to the metrics."""
    metrics.watch_state(vitals)
    return HealthServer(
        vitals,
        metrics.registry,
        host=settings.http_host,
        port=settings.http_port,
        # Long enough for an idle worker: its keeper calls Redis more than once per lease.
        contact_limit_seconds=max(settings.lease_seconds, 2 * settings.block_seconds),
    )


def _traces(settings: Settings) -> Traces:
    """Where the spans of claims go. ConfigurationError without the packages for it."""
    if settings.traces == "off":
        return NoTraces()
    try:
        # Here, since a worker that does not trace need not have the packages.
        from service.outgoing.spans import otlp_traces
    except ImportError as error:
        message = f"traces: needs the extra `otel`: {error}"
        raise ConfigurationError(message) from error
    return otlp_traces(queue=settings.queue, model=settings.model_name, worker=str(settings.worker))


def _brokers(settings: Settings, connection: redis.Redis) -> dict[int, Broker]:
    """Shard -> broker, for each served shard, over one pool of connections."""
    return {
        shard: Broker(
            connection,
            queue=settings.queue,
            shard=shard,
            lease_seconds=settings.lease_seconds,
            max_attempts=settings.max_attempts,
            max_queue_seconds=settings.max_queue_seconds,
            retention_seconds=settings.retention_seconds,
            retry_seconds=TRY_SECONDS,
            durable=settings.durable,
        )
        for shard in settings.own_shards
    }
