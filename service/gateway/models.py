"""The models of a queue and their adapters, from the registry of its workers."""

import contextlib
from collections.abc import Callable
from time import monotonic

from quire.client.client_async import AsyncClient
from quire.errors import QuireError
from quire.queue.workers.workers import adapters_of
from quire.wire.adapters import is_adapter_name, name_with
from quire.wire.refusals import nearest
from service.gateway.refusals import Refused, unknown_model

#: How long the names of one reading of the registry are reused.
FRESH_SECONDS = 5.0

#: What a request waits for.
NO_WORKER = "no worker of this queue is alive; the request waits for one"
LOADING = "the workers of this queue still load their model; the request waits for one"


class Models:
    """The models of the queue; read again after FRESH_SECONDS, and whenever a name is not found.

    A model with an adapter has the name `<model>:<adapter>`: OpenAI's API has no other field for
    an adapter.
    """

    def __init__(self, client: AsyncClient, *, clock: Callable[[], float] = monotonic) -> None:
        self._client = client
        self._clock = clock
        self._models: list[str] = []
        self._names: list[str] = []
        #: Whether all live workers still load.
        self._is_loading = False
        self._read_at = float("-inf")

    async def names(self) -> list[str]:
        """All names, read now. BrokerUnavailable."""
        workers = [one for broker in self._client.brokers for one in await broker.workers()]
        served = adapters_of(workers)
        self._is_loading = not any(one.is_alive and not one.is_loading for one in workers)
        self._models = list(served)
        # Models come first: a model's own name may equal that of another model with an adapter.
        names = dict.fromkeys(self._models)
        for model, adapters in served.items():
            names |= dict.fromkeys(name_with(model, adapter) for adapter in adapters)
        self._names = list(names)
        self._read_at = self._clock()
        return self._names

    async def missing(self) -> str:
        """What every request waits for, as a sentence; read at most every FRESH_SECONDS.

        Empty if a live worker has a model, and while Redis does not answer, because then nothing is
        known about workers.
        """
        with contextlib.suppress(QuireError):
            if self._clock() - self._read_at > FRESH_SECONDS:
                await self.names()
            if not self._models:
                return NO_WORKER
            if self._is_loading:
                return LOADING
        return ""

    async def name_for(self, model: object, adapter: object) -> str:
        """The model name that an answer shows. Refused for a model that no worker serves.

        `model` and `adapter` are the fields of a body and may have any type. While no worker is
        alive every name is accepted, and a later worker refuses a wrong one. An unknown `adapter`
        is also left to the worker. A call without a model gets the queue's model, if there is
        exactly one.
        """
        requested = model if isinstance(model, str) else None
        is_stale = self._clock() - self._read_at > FRESH_SECONDS
        if is_stale or (requested is not None and requested not in self._names):
            await self.names()
        if requested is None:
            requested = self._models[0] if len(self._models) == 1 else ""
        elif self._names and requested not in self._names:
            served = ", ".join(map(repr, self._models))
            hint = nearest(requested, self._names)
            raise Refused(unknown_model(f"this queue serves {served}, not {requested!r}{hint}"))
        if requested in self._models and is_adapter_name(adapter):
            return name_with(requested, str(adapter))
        return requested
