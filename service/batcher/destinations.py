"""Where the requests of a batch go: the queue of its model, from the table of models."""

from collections.abc import Sequence
from dataclasses import dataclass

import redis

from quire.batch.batch import brokers_of
from quire.queue.producer import Producer
from service.batcher.settings import BatcherSettings
from service.shared.model_table import ModelRoute, read_models


@dataclass(frozen=True, slots=True)
class Destination:
    """The brokers of one queue. `model` replaces that of each line; None leaves it as it is."""

    brokers: Sequence[Producer]
    model: str | None = None


class Destinations:
    """The destinations of one batcher.

    A batch of a queue without a table goes to that queue. With a table all lines of a batch have
    the same model, as in OpenAI's API, and go to the queue of that model.

    Raises:
        ConfigurationError: the table is wrong.
    """

    def __init__(self, connection: redis.Redis, settings: BatcherSettings) -> None:
        self._connection = connection
        self._settings = settings
        self._table = read_models(settings.models_file)
        self._home = self._brokers(
            ModelRoute(name="", queue=settings.queue, shards=settings.shards)
        )
        routes = self._table.routes if self._table else ()
        self._by_queue = {route.queue: self._brokers(route) for route in routes}

    @property
    def is_by_model(self) -> bool:
        """Whether the model decides."""
        return self._table is not None

    def of(self, model: str) -> Destination | None:
        """The destination of a batch; `model` is empty if its lines name none. None: unknown."""
        if self._table is None:
            return Destination(self._home)
        if not model and len(self._table.routes) == 1:
            model = self._table.routes[0].name
        found = self._table.find(model)
        if found is None:
            return None
        route, served_as = found
        return Destination(self._by_queue[route.queue], served_as)

    def _brokers(self, route: ModelRoute) -> list[Producer]:
        settings = self._settings
        return brokers_of(
            self._connection,
            queue=route.queue,
            shards=route.shards,
            settings={
                "max_queue_seconds": settings.max_queue_seconds,
                "retention_seconds": settings.retention_seconds,
                "durable": settings.durable,
            },
        )
