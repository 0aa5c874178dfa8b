"""The client of an event loop: the verbs of `Client`, awaited.

    async with AsyncClient("redis://127.0.0.1:6379/0") as quire:
        handle = await quire.submit("12+34=", sampling={"max_tokens": 16}, deadline=60)
        async for chunk in handle.stream():
            print(chunk.text, end="")

All handles of a client read through one connection, a thousand as well as one. What a request is,
what its log says and which errors there are is the code behind `Client`, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Unpack

import redis.asyncio

from quire.arguments import RequestArguments, RequestOptions
from quire.async_broker import AsyncBroker, connect_async
from quire.client import DEFAULT_URL
from quire.connection import MAX_BLOCK_SECONDS
from quire.errors import QuireError, UnknownRequest
from quire.following import Following, joined, raise_unless_completed
from quire.output import Completion, State, TokenChunk
from quire.parting import Parting
from quire.producing import must_ask_clock, ready_requests
from quire.protocol import GenerationRequest
from quire.routing import placed, shard_of
from quire.transitions import RequestStatus


class AsyncClient:
    """Talks to one queue from one event loop.

    `broker` is a Redis URL, a connection made with `connect_async`, or an AsyncBroker with settings
    of its own. Nothing is sent before the first call. Only a connection made here is closed here.
    All methods may raise BrokerUnavailable. `shards` and `max_backlog` see Client.
    """

    def __init__(
        self,
        broker: str | redis.asyncio.Redis | AsyncBroker = DEFAULT_URL,
        *,
        queue: str = "default",
        tenant: str = "default",
        max_backlog: int | None = None,
        shards: int = 1,
    ) -> None:
        if shards < 1 or (shards > 1 and isinstance(broker, AsyncBroker)):
            raise ValueError("a queue has at least one shard, and a broker serves only one")
        self._owned = connect_async(broker) if isinstance(broker, str) else None
        connection = self._owned or broker
        self._owns_brokers = isinstance(connection, redis.asyncio.Redis)
        if isinstance(connection, AsyncBroker):
            self._brokers = [connection]
        else:
            assert isinstance(connection, redis.asyncio.Redis)
            self._brokers = [
                AsyncBroker(connection, queue=queue, shard=shard, max_backlog=max_backlog)
                for shard in range(shards)
            ]
        self._tenant = tenant

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what this client started and closes what it opened; harmless when repeated."""
        if self._owns_brokers:
            for broker in self._brokers:
                await broker.close()
        if self._owned is not None:
            await self._owned.aclose()

    async def submit(
        self, prompt: str | Sequence[int] | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncHandle:
        """See `Client.submit`."""
        return (await self.submit_many([{"prompt": prompt, **options}]))[0]

    async def submit_many(
        self, requests: Iterable[GenerationRequest | RequestArguments]
    ) -> list[AsyncHandle]:
        """See `Client.submit_many`."""
        items = list(requests)
        now_ms = await self._brokers[0].now_ms() if must_ask_clock(items) else None
        num_shards = len(self._brokers)
        ready = [
            placed(request, num_shards=num_shards)
            for request in ready_requests(items, tenant=self._tenant, now_ms=now_ms)
        ]
        parting = Parting(ready, num_shards)
        for shard, part in parting.parts():
            try:
                parting.answered(shard, await self._brokers[shard].submit_many(part))
            except QuireError as error:
                parting.failed(error)
        return [
            AsyncHandle(self._broker_of(answer.request_id), answer.request_id, known=True)
            for answer in parting.answers()
        ]

    def attach(self, request_id: str) -> AsyncHandle:
        """A handle to a request submitted elsewhere or earlier. Nothing is sent yet."""
        return AsyncHandle(self._broker_of(request_id), request_id)

    def stream(
        self, request_id: str, *, after: int = 0, prefix_hash: str = ""
    ) -> AsyncIterator[TokenChunk]:
        """See `Handle.stream`."""
        return self.attach(request_id).stream(after=after, prefix_hash=prefix_hash)

    async def result(self, request_id: str, *, timeout: float | None = None) -> Completion:
        """See `Handle.result`."""
        return await self.attach(request_id).result(timeout=timeout)

    async def cancel(self, request_id: str) -> State:
        """See `Handle.cancel`."""
        return await self._broker_of(request_id).cancel(request_id)

    async def status(self, request_id: str) -> RequestStatus:
        """A snapshot of the request. UnknownRequest."""
        return await self._broker_of(request_id).status(request_id)

    def _broker_of(self, request_id: str) -> AsyncBroker:
        return self._brokers[shard_of(request_id, len(self._brokers))]


class AsyncHandle:
    """One request as its caller sees it. It holds no state but the id and may be thrown away."""

    def __init__(self, broker: AsyncBroker, request_id: str, *, known: bool = False) -> None:
        self.request_id = request_id
        self._broker = broker
        self._known = known

    def __repr__(self) -> str:
        return f"AsyncHandle({self.request_id!r})"

    async def stream(self, *, after: int = 0, prefix_hash: str = "") -> AsyncIterator[TokenChunk]:
        """See `Handle.stream`."""
        following = Following(
            self.request_id, after=after, known=self._known, prefix_hash=prefix_hash
        )
        async for item in _follow(self._broker, following):
            if isinstance(item, Completion):
                raise_unless_completed(item)
                return
            self._known = True
            yield item

    async def result(self, *, timeout: float | None = None) -> Completion:
        """See `Handle.result`."""
        following = Following(self.request_id, known=self._known, timeout=timeout)
        chunks: list[TokenChunk] = []
        async for item in _follow(self._broker, following):
            if isinstance(item, Completion):
                completion = joined(item, chunks)
                raise_unless_completed(completion)
                return completion
            self._known = True
            chunks.append(item)
        raise AssertionError("an output is followed to its end")

    async def cancel(self) -> State:
        """See `Handle.cancel`."""
        return await self._broker.cancel(self.request_id)

    async def status(self) -> RequestStatus:
        """A snapshot of the request. UnknownRequest."""
        return await self._broker.status(self.request_id)


async def _follow(
    broker: AsyncBroker, following: Following
) -> AsyncIterator[TokenChunk | Completion]:
    """The chunks beyond the follower's place as they come, and the completion, last."""
    request_id, block = following.request_id, None
    while True:
        reads = await broker.read_output(following.position, block_seconds=block)
        read = reads.get(request_id)
        if read is None:
            following.silent(await _status(broker, request_id))
        else:
            for item in following.take(read):
                yield item
            if read.completion is not None:
                return
        block = following.patience(MAX_BLOCK_SECONDS)


async def _status(broker: AsyncBroker, request_id: str) -> RequestStatus | None:
    try:
        return await broker.status(request_id)
    except UnknownRequest:
        return None
