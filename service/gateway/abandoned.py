"""Cancels requests that nobody waits for any more, once Redis can be reached. Knows no HTTP.

When Redis goes away while a call is answered, its caller is told to try again, and OpenAI's clients
do so by themselves: the requests of the first call would then be computed for nobody. Nothing else
depends on this list: a gateway that dies with it loses no answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import structlog

from quire.errors import BrokerUnavailable, QueueFull, QuireError
from service.gateway.http.tasks import end

#: Pause between two tries while Redis is away, or has no memory left.
AGAIN_SECONDS = 0.5

#: The most requests that are kept, some 20 MiB; beyond that the oldest are dropped and go on.
MAX_ABANDONED = 100_000

#: What a cancellation is refused with that may be repeated: it is a write, and needs memory, too.
REFUSED_FOR_NOW = (BrokerUnavailable, QueueFull)

_log = structlog.get_logger("service.gateway")


class Abandoned:
    """Cancels requests as soon as that can be done. For one event loop."""

    def __init__(self, cancel: Callable[[str], Awaitable[object]]) -> None:
        self._cancel = cancel
        #: In the order in which they came.
        self._ids: dict[str, None] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, request_ids: Iterable[str]) -> None:
        """Cancel these as soon as possible, whether they have reached the queue or not."""
        self._ids |= dict.fromkeys(request_ids)
        while len(self._ids) > MAX_ABANDONED:
            del self._ids[next(iter(self._ids))]
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="quire-abandoned")

    async def close(self) -> None:
        """Stop trying, and log how many requests go on."""
        if self._task is not None:
            await end(self._task)
        if self._ids:
            _log.warning("requests go on that nobody waits for", requests=len(self._ids))

    async def _run(self) -> None:
        while self._ids:
            request_id = next(iter(self._ids))
            try:
                await self._cancel(request_id)
            except REFUSED_FOR_NOW:
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            except QuireError:
                # It never reached the queue, has expired, or cannot be read by anybody.
                pass
            self._ids.pop(request_id, None)
