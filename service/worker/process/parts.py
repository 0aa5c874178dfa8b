"""Builds the parts of a worker and connects them. Starts none of them; `worker` does.

The parts share the Outbox, the Vitals, the Contact, the Metrics and the brokers. All of these are
thread-safe.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import redis

from quire.queue.rank.policy import QueuePolicy
from quire.wire.protocol import Activity
from service.shared.settings.sources import ConfigurationError
from service.worker.incoming.compiling import Compiling
from service.worker.incoming.intake import Intake
from service.worker.incoming.origins import QueueClock
from service.worker.incoming.reception import Reception
from service.worker.loop import EngineLoop
from service.worker.model.adapters import announced_adapters
from service.worker.model.served import ServedModel
from service.worker.model.shelf import Shelf
from service.worker.observe.health import HealthServer
from service.worker.observe.metrics import Metrics
from service.worker.observe.vitals import Vitals
from service.worker.outgoing.contact import Contact
from service.worker.outgoing.leases import Heartbeat, Housekeeper
from service.worker.outgoing.outbox import Outbox
from service.worker.outgoing.publisher import Publisher
from service.worker.outgoing.traces import NoTraces, Traces
from service.worker.process.chooser import Chooser, Rules
from service.worker.process.events import (
    DrainRequested,
    Event,
    ModelLoaded,
    OutboxEmpty,
    PlaceEmpty,
    SwitchChosen,
)
from service.worker.process.places import Place, places_of
from service.worker.settings.config import Settings
from service.worker.settings.several import settings_of_models


@dataclass(frozen=True, slots=True)
class _Known:
    """What the registry shows of a model that this worker has loaded once."""

    adapters: Mapping[str, str]
    abilities: Mapping[str, float]
    policy: QueuePolicy


class WorkerParts:
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
        models = settings_of_models(settings)
        self._settings = settings
        self._report = report
        self._served: ServedModel | None = None
        #: What live workers can serve of each model that was loaded once, for the registry.
        self._known: dict[str, _Known] = {}
        self.vitals = Vitals(stall_timeout_seconds=settings.stall_timeout_seconds)
        self.metrics = Metrics(model=models[0].model_name, queue=models[0].queue)
        self._queue_clock = QueueClock()
        self._contact = Contact(self.vitals, self.metrics, silence_seconds=settings.lease_seconds)
        self.outbox = Outbox(on_empty=lambda: report(OutboxEmpty()))
        # Two connections: commits and heartbeats need a shorter timeout than a blocking read.
        self.connection = connect(settings.connection_url, block_seconds=0.0)
        reading = connect(settings.connection_url, block_seconds=settings.block_seconds)
        self.places = places_of(models, self.metrics, self.connection, reading)
        #: Brokers by the number of their place, for everything except the intakes' reads.
        self.brokers = {place.number: place.broker for place in self.places}
        self._shelf = Shelf(load, budget_bytes=settings.models_memory_bytes)
        self.model = models[0].model_name
        self.loop = EngineLoop(
            partial(self._shelf.take, models[0]),
            self.outbox,
            vitals=self.vitals,
            metrics=self.metrics,
            on_loaded=lambda served: report(ModelLoaded(served)),
        )
        self.compiling = Compiling(
            self.outbox, engine=self.loop, vitals=self.vitals, settings=settings
        )
        self.traces = _traces(settings, self.places)
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
        self.heartbeat = self._heartbeat()
        self.keeper = self._keeper()
        #: Only with several models.
        self.chooser = self._chooser() if len(models) > 1 else None
        for place in self.places:
            is_served = partial(self._is_served, place.model)
            place.metrics.watch_state(self.vitals, is_served=is_served)
        self.health = _health(settings, self.vitals, self.metrics)

    def complete(self, served: ServedModel) -> dict[str, Intake]:
        """Build the parts that need the model: returns thread name -> intake, one for each shard.

        From now on the metrics and the worker registry show this model.
        """
        places = [place for place in self.places if place.model == self.model]
        self._served = served
        self._known[self.model] = _Known(served.adapters, served.abilities, served.queue_policy)
        self.compiling.serve(served.grammars)
        metrics = self.place.metrics
        metrics.describe(build=served.build, sizes=served.sizes, cache_bytes=served.cache_bytes)
        if served.read_memory is not None:
            metrics.watch_memory(served.build.get("device", ""), self._read_memory)
        if served.read_threads is not None:
            metrics.watch_threads(self._read_threads)
        metrics.models_loaded.set(len(self._shelf))
        if self.chooser is not None:
            self.chooser.serves(self.model)
        return {
            f"intake-{place.number}": self._intake(place, served=served, num_intakes=len(places))
            for place in places
        }

    @property
    def place(self) -> Place:
        """The first place of the model that is served."""
        return next(place for place in self.places if place.model == self.model)

    def switch(self, model: str) -> str:
        """Release all requests and serve another model; the intakes must have ended.

        Returns how it comes into memory: it is still there (`kept`), or has to be `loaded`. The
        event ModelLoaded follows.
        """
        # Nothing here may refer to a model that the shelf drops: its memory must be free.
        self._served, self.model = None, model
        self.compiling.release()
        source = "kept" if self._shelf.holds(model) else "loaded"
        self.loop.switch(partial(self._shelf.take, self.place.settings), self.place.metrics)
        return source

    def _is_served(self, model: str) -> bool:
        return model == self.model

    def _read_memory(self) -> Mapping[str, int]:
        read = self._served.read_memory if self._served else None
        return read() if read else {}

    def _read_threads(self) -> int:
        read = self._served.read_threads if self._served else None
        return read() if read else 0

    def _chooser(self) -> Chooser:
        settings = self._settings
        return Chooser(
            self.places,
            self.connection,
            rules=Rules(settings.switch_stay_seconds, settings.switch_wait_seconds),
            has_work=lambda: not self.outbox.is_empty,
            report=lambda model: self._report(SwitchChosen(model)),
            vitals=self.vitals,
            contact=self._contact,
        )

    def _intake(self, place: Place, *, served: ServedModel, num_intakes: int) -> Intake:
        reception = Reception(
            place.reading,
            self.outbox,
            place=place.number,
            loop=self.loop,
            compiling=self.compiling,
            served=served,
            settings=place.settings,
            contact=self._contact,
            metrics=place.metrics,
            queue_clock=self._queue_clock,
            on_poll=partial(self.vitals.beat, f"intake-{place.number}"),
        )
        return Intake(
            place.reading,
            self.outbox,
            reception=reception,
            fingerprint=served.fingerprint,
            policy=served.queue_policy,
            max_num_seqs=served.engine.config.max_num_seqs,
            place=place.number,
            num_intakes=num_intakes,
            loop=self.loop,
            compiling=self.compiling,
            settings=place.settings,
            vitals=self.vitals,
            contact=self._contact,
            metrics=place.metrics,
            on_queue_empty=partial(self._report, PlaceEmpty(place.number)),
        )

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            self.brokers,
            self.outbox,
            holder=self.publisher,
            vitals=self.vitals,
            contact=self._contact,
            lease_seconds=self._settings.lease_seconds,
        )

    def _keeper(self) -> Housekeeper:
        return Housekeeper(
            self.brokers,
            worker=self._settings.worker,
            serves=self._serves,
            policy=self._policy,
            pictures=self.outbox.pictures,
            load=self._load,
            on_drain=lambda: self._report(DrainRequested()),
            vitals=self.vitals,
            contact=self._contact,
            metrics=self.metrics,
            lease_seconds=self._settings.lease_seconds,
        )

    def _serves(self, place: int) -> tuple[str, Mapping[str, str]]:
        """The name and the adapters of a place's model, as the worker registry shows them."""
        settings = self._settings_of[place]
        known = self._known.get(settings.model_name)
        adapters = known.adapters if known else announced_adapters(settings.adapters)
        return settings.model_name, adapters

    def _policy(self, place: int) -> str:
        """The policy of this worker at a place, as the worker registry shows it."""
        known = self._known.get(self._settings_of[place].model_name)
        return str(known.policy) if known else ""

    def _load(self, place: int) -> dict[str, float]:
        """The worker's load and abilities, as the worker registry of a place shows them.

        The claims by activity are those of this place, so that they can be added up.
        """
        counts = self.outbox.num_by_activity(place)
        load: dict[str, float] = {
            "claims": len(self.outbox.claims()),
            "running": self.loop.num_running,
            "kv_usage": round(self.loop.kv_cache_usage, 3),
            "generated": self.loop.num_generated,
        }
        load |= {str(activity): counts[activity] for activity in Activity}
        known = self._known.get(self._settings_of[place].model_name)
        return {**load, **(known.abilities if known else {})}

    @cached_property
    def _settings_of(self) -> dict[int, Settings]:
        return {place.number: place.settings for place in self.places}


def _health(settings: Settings, vitals: Vitals, metrics: Metrics) -> HealthServer:
    """The health server."""
    return HealthServer(
        vitals,
        metrics.registry,
        host=settings.http_host,
        port=settings.http_port,
        # Long enough for an idle worker: its keeper calls Redis more than once per lease.
        contact_limit_seconds=max(settings.lease_seconds, 2 * settings.block_seconds),
    )


def _traces(settings: Settings, places: Sequence[Place]) -> Traces:
    """Where the spans of claims go. ConfigurationError without the packages for it."""
    if settings.traces == "off":
        return NoTraces()
    try:
        # Here, since a worker that does not trace need not have the packages.
        from service.worker.outgoing.spans import otlp_traces
    except ImportError as error:
        message = f"traces: needs the extra `otel`: {error}"
        raise ConfigurationError(message) from error
    queues = {place.number: place.settings.queue for place in places}
    return otlp_traces(queues=queues, worker=str(settings.worker))
