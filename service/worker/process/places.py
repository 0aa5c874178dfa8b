"""The places that a worker serves: each shard of each of its queues, with a number of its own.

Without several models a place is a shard, and its number is that of the shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import redis

from quire.queue.roles import WorkerSide
from service.worker.observe.metrics import Metrics
from service.worker.settings.bounds import TRY_SECONDS
from service.worker.settings.config import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One shard of the queue of one model.

    `settings` and `metrics` are those of the model. `reading` is the broker of the intake, `broker`
    that of everything else: commits need a shorter timeout than a blocking read.
    """

    number: int
    settings: Settings
    metrics: Metrics
    broker: WorkerSide
    reading: WorkerSide

    @property
    def model(self) -> str:
        return self.settings.model_name


def places_of(
    models: Sequence[Settings], metrics: Metrics, connection: redis.Redis, reading: redis.Redis
) -> tuple[Place, ...]:
    """All places of these models. `metrics` are those of the first one."""
    places: list[Place] = []
    for settings in models:
        is_alone = len(models) == 1
        shards = settings.own_shards
        numbers = shards if is_alone else range(len(places), len(places) + len(shards))
        of_model = metrics
        if places:
            model, queue = settings.model_name, settings.queue
            of_model = metrics.beside(model=model, queue=queue, places=numbers)
        places += [
            Place(
                number=number,
                settings=settings,
                metrics=of_model,
                broker=_broker(settings, connection, shard),
                reading=_broker(settings, reading, shard),
            )
            for number, shard in zip(numbers, shards, strict=True)
        ]
    return tuple(places)


def _broker(settings: Settings, connection: redis.Redis, shard: int) -> WorkerSide:
    return WorkerSide(
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
