"""The handle of a request for coroutines; its procedures are in handle.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from quire.client.following import Following, raise_unless_completed
from quire.client.handle import end_of, next_read
from quire.client.steps import in_loop, in_turns
from quire.queue.async_broker import AsyncBroker
from quire.queue.request.status import RequestStatus
from quire.transport.procedure import run_async
from quire.wire.output import Completion, State, TokenChunk


class AsyncHandle:
    """One request, see `Handle`. It has no state but the id, so it may be discarded."""

    def __init__(self, broker: AsyncBroker, request_id: str, *, known: bool = False) -> None:
        self.request_id = request_id
        self._broker = broker
        self._known = known

    def __repr__(self) -> str:
        return f"AsyncHandle({self.request_id!r})"

    async def stream(self, *, after: int = 0, prefix_hash: str = "") -> AsyncIterator[TokenChunk]:
        """See `Handle.stream`."""
        async for item in self.follow(after=after, prefix_hash=prefix_hash):
            if isinstance(item, Completion):
                raise_unless_completed(item)
                return
            yield item

    async def follow(
        self, *, after: int = 0, prefix_hash: str = ""
    ) -> AsyncIterator[TokenChunk | Completion]:
        """See `Handle.follow`."""
        async for items in self.follow_reads(after=after, prefix_hash=prefix_hash):
            for item in items:
                yield item

    async def follow_reads(
        self,
        *,
        after: int = 0,
        prefix_hash: str = "",
        explains: bool = True,
        gate: AbstractAsyncContextManager[Any] | None = None,
    ) -> AsyncIterator[Sequence[TokenChunk | Completion]]:
        """The items of `follow`, in non-empty lists of items that were read together.

        One list has at most what one turn decodes: if the caller stops, the rest is not decoded.
        With `explains` False, no warning is logged if no worker is alive. What one read brought is
        decoded and given inside the `gate`, such as a lock that several readers share: then only
        one of them holds decoded items that its caller has not come to.
        """
        following = Following(
            self.request_id,
            after=after,
            known=self._known,
            prefix_hash=prefix_hash,
            outage_seconds=self._broker.outage_seconds,
            explains=explains,
        )
        while not following.has_ended:
            read = await run_async(next_read(self._broker, following), in_loop)
            taken = following.take(read)
            async with gate or nullcontext():
                if read.begins_long:
                    # Others would wait for it: it cannot be taken apart in turns.
                    first = await asyncio.to_thread(next, taken, None)
                    if first is not None:
                        self._known = True
                        yield [first]
                async for items in in_turns(taken):
                    self._known = True
                    yield items

    async def result(self, *, timeout: float | None = None) -> Completion:
        """See `Handle.result`."""
        following = Following(
            self.request_id,
            known=self._known,
            timeout=timeout,
            outage_seconds=self._broker.outage_seconds,
        )
        completion = await run_async(end_of(self._broker, following), in_loop)
        raise_unless_completed(completion)
        return completion

    async def cancel(self) -> State:
        """See `Handle.cancel`."""
        return await self._broker.cancel(self.request_id)

    async def status(self) -> RequestStatus:
        """A snapshot of the request. UnknownRequest."""
        return await self._broker.status(self.request_id)
