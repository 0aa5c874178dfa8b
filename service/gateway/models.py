"""The models of a queue and their adapters, from the registry of its workers."""

import contextlib
from collections.abc import Callable
from time import monotonic

from quire.client.client_async import AsyncClient
from quire.errors import QuireError
from quire.wire.adapters import is_adapter_name, name_with
from quire.wire.refusals import nearest
from service.gateway.refusals import Refused, unknown_model

#: How long the names of one reading of the registry are reused.
FRESH_SECONDS = 5.0


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
        self._read_at = float("-inf")

    async def names(self) -> list[str]:
        """All names, read now. BrokerUnavailable."""
        served = await self._client.adapters()
        self._models = list(served)
        # Models come first: a model's own name may equal that of another model with an adapter.
        names = dict.fromkeys(self._models)
        for model, adapters in served.items():
            names |= dict.fromkeys(name_with(model, adapter) for adapter in adapters)
        self._names = list(names)
        self._read_at = self._clock()
        return self._names

    async def have_worker(self) -> bool:
        """Whether any live worker serves a model; read at most every FRESH_SECONDS.

        True while Redis does not answer, because then nothing is known about workers.
        """
        with contextlib.suppress(QuireError):
            if self._clock() - self._read_at > FRESH_SECONDS:
                await self.names()
            return bool(self._models)
        return True

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
