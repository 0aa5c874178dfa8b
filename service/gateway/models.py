"""Which models a queue has, as its workers say it in the registry."""

from collections.abc import Callable
from time import monotonic

from quire.aio import AsyncClient
from service.gateway.refusals import Refused, unknown_model

#: How long what the workers said is believed where it says what the caller hopes.
FRESH_SECONDS = 5.0


class Models:
    """The models of the queue, looked up once in a while and whenever a name is not among them."""

    def __init__(self, client: AsyncClient, *, clock: Callable[[], float] = monotonic) -> None:
        self._client = client
        self._clock = clock
        self._names: list[str] = []
        self._looked = float("-inf")

    async def names(self) -> list[str]:
        """All of them now. BrokerUnavailable."""
        self._names = await self._client.models()
        self._looked = self._clock()
        return self._names

    async def name_for(self, asked: str | None) -> str:
        """The name that an answer begins with. Refused for a model that no worker serves.

        With no worker there nobody can say what the queue will serve, so any name is let in, and is
        the worker's to refuse. A call that names none gets what is there.
        """
        is_stale = self._clock() - self._looked > FRESH_SECONDS
        if is_stale or (asked is not None and asked not in self._names):
            await self.names()
        if asked is None:
            return self._names[0] if len(self._names) == 1 else ""
        if self._names and asked not in self._names:
            served = ", ".join(map(repr, self._names))
            raise Refused(unknown_model(f"this queue serves {served}, not {asked!r}"))
        return asked
