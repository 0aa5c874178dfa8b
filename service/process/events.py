"""The events that a worker's threads send to its main thread, which waits for nothing else."""

from dataclasses import dataclass

from service.model.served import ServedModel
from service.process.threads import ThreadDied


class StopAsked:
    """Somebody wants the worker to end."""


class DrainAsked:
    """An operator wants the worker to drain, and may say so again while it does."""


@dataclass(frozen=True, slots=True)
class ShardEmpty:
    """In a burst: nothing is left to do in this shard."""

    shard: int


class OutboxEmpty:
    """The last open claim has just been settled."""


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """The engine thread is ready to serve."""

    served: ServedModel


Event = StopAsked | DrainAsked | ShardEmpty | OutboxEmpty | ModelLoaded | ThreadDied
