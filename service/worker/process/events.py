"""The events that a worker's threads send to its main thread, which waits only for them."""

from dataclasses import dataclass

from service.worker.model.served import ServedModel
from service.worker.process.threads import ThreadDied


class StopRequested:
    """A signal, or a caller of `Worker.stop`, asks the worker to end."""


class DrainRequested:
    """An operator asks the worker to drain. May be repeated while it drains."""


@dataclass(frozen=True, slots=True)
class PlaceEmpty:
    """Only with the setting `burst`: nothing is left to do in this place."""

    place: int


class OutboxEmpty:
    """The last claim has been committed or released."""


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """The engine thread is ready to serve."""

    served: ServedModel


@dataclass(frozen=True, slots=True)
class SwitchChosen:
    """Only with several models: this one is to be served next."""

    model: str


Event = (
    SwitchChosen
    | StopRequested
    | DrainRequested
    | PlaceEmpty
    | OutboxEmpty
    | ModelLoaded
    | ThreadDied
)
