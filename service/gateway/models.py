"""Which models a queue has, and with which adapters, as its workers say it in the registry."""

from collections.abc import Callable
from time import monotonic

from quire.adapters import is_adapter_name, name_with
from quire.aio import AsyncClient
from quire.refusals import nearest
from service.gateway.refusals import Refused, unknown_model

#: How long what the workers said is believed where it says what the caller hopes.
FRESH_SECONDS = 5.0


class Models:
    """The models of the queue, looked up once in a while and whenever a name is not among them.

    One with an adapter has a name of its own, `<model>:<adapter>`: OpenAI's callers know no other
    way to ask for it.
    """

    def __init__(self, client: AsyncClient, *, clock: Callable[[], float] = monotonic) -> None:
        self._client = client
        self._clock = clock
        self._models: list[str] = []
        self._names: list[str] = []
        self._looked = float("-inf")

    async def names(self) -> list[str]:
        """All of them now. BrokerUnavailable."""
        served = await self._client.adapters()
        self._models = list(served)
        # By name, so that a model comes first whose own is that of another with an adapter.
        names = dict.fromkeys(self._models)
        for model, adapters in served.items():
            names |= dict.fromkeys(name_with(model, adapter) for adapter in adapters)
        self._names = list(names)
        self._looked = self._clock()
        return self._names

    async def name_for(self, model: object, adapter: object) -> str:
        """The name that an answer begins with. Refused for a model that no worker serves.

        Of what stands in a body, which may be anything. With no worker there nobody can say what
        the queue will serve, so any name is let in, and is the worker's to refuse; so is an adapter
        that is named apart. A call that names no model gets what is there.
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
