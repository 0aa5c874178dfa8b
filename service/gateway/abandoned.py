"""Cancels requests that nobody waits for any more, as soon as Redis can be reached. Knows no HTTP.

If Redis fails while a call is answered, its caller gets a 503, and OpenAI's clients repeat the call
by themselves. The requests of the first call would then be computed for nobody. Only their
cancellation depends on this list: a gateway that dies with it loses no answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import structlog

from quire.errors import UNAVAILABLE, QuireError
from service.shared.http.tasks import end

#: Pause between two attempts while Redis does not answer, or has no memory left.
RETRY_SECONDS = 0.5

#: The most requests in the list, some 20 MiB. Beyond that the oldest are dropped: they are
#: computed to their end.
MAX_ABANDONED = 100_000

_log = structlog.get_logger("service.gateway")


class AbandonedRequests:
    """Cancels requests as soon as Redis allows it. For one event loop."""

    def __init__(self, cancel: Callable[[str], Awaitable[object]]) -> None:
        self._cancel = cancel
        #: In the order in which they were added.
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
        """Stop cancelling, and log how many requests run on."""
        if self._task is not None:
            await end(self._task)
        if self._ids:
            _log.warning("requests run on that nobody waits for", requests=len(self._ids))

    async def _run(self) -> None:
        while self._ids:
            request_id = next(iter(self._ids))
            try:
                await self._cancel(request_id)
            except UNAVAILABLE:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            except QuireError:
                # The request never reached the queue, has expired, or has an unreadable record.
                pass
            self._ids.pop(request_id, None)
