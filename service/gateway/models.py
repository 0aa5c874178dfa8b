"""Which models a queue has, and with which adapters, from the registry of its workers."""

import contextlib
from collections.abc import Callable
from time import monotonic

from quire.client.async_client import AsyncClient
from quire.errors import QuireError
from quire.wire.adapters import is_adapter_name, name_with
from quire.wire.refusals import nearest
from service.gateway.refusals import Refused, unknown_model

#: How long a name that was found is served from the last reading of the registry.
FRESH_SECONDS = 5.0


class Models:
    """The models of the queue; read again after FRESH_SECONDS, and whenever a name is not found.

    A model with an adapter has the name `<model>:<adapter>`, the only way for OpenAI's callers to
    ask for it.
    """

    def __init__(self, client: AsyncClient, *, clock: Callable[[], float] = monotonic) -> None:
        self._client = client
        self._clock = clock
        self._models: list[str] = []
        self._names: list[str] = []
        self._looked = float("-inf")

    async def names(self) -> list[str]:
        """All names, read now. BrokerUnavailable."""
        served = await self._client.adapters()
        self._models = list(served)
        # Models first: the name of one may also be that of another with an adapter.
        names = dict.fromkeys(self._models)
        for model, adapters in served.items():
            names |= dict.fromkeys(name_with(model, adapter) for adapter in adapters)
        self._names = list(names)
        self._looked = self._clock()
        return self._names

    async def are_served(self) -> bool:
        """Whether some live worker serves a model, as far as is known; asked every FRESH_SECONDS.

        A Redis that does not answer says nothing about workers.
        """
        with contextlib.suppress(QuireError):
            if self._clock() - self._looked > FRESH_SECONDS:
                await self.names()
            return bool(self._models)
        return True

    async def name_for(self, model: object, adapter: object) -> str:
        """The model name that an answer shows. Refused for a model that no worker serves.

        `model` and `adapter` are those of a body, and may be anything. Without workers any name is
        accepted, and left to a later worker to refuse; so is an unknown `adapter`. A call without a
        model gets the queue's model, if there is exactly one.
        """
        asked = model if isinstance(model, str) else None
        is_stale = self._clock() - self._looked > FRESH_SECONDS
        if is_stale or (asked is not None and asked not in self._names):
            await self.names()
        if asked is None:
            asked = self._models[0] if len(self._models) == 1 else ""
        elif self._names and asked not in self._names:
            served = ", ".join(map(repr, self._models))
            hint = nearest(asked, self._names)
            raise Refused(unknown_model(f"this queue serves {served}, not {asked!r}{hint}"))
        if asked in self._models and is_adapter_name(adapter):
            return name_with(asked, str(adapter))
        return asked
