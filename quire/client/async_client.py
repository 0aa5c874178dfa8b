"""The client for an event loop: the methods of `Client` as coroutines.

    async with AsyncClient("redis://127.0.0.1:6379/0") as quire:
        handle = await quire.submit("12+34=", sampling={"max_tokens": 16}, deadline=60)
        async for chunk in handle.stream():
            print(chunk.text, end="")

All handles of a client read through one connection, however many there are. Client uses the same
code for requests, logs and errors.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Unpack, overload

import redis.asyncio

from quire.client.async_group_handle import AsyncGroupHandle
from quire.client.async_handle import AsyncHandle
from quire.client.client import DEFAULT_URL, check_shards, submitting
from quire.client.ends import EndsReading, SinkReading, reading_of
from quire.client.steps import in_loop
from quire.client.vectors import (
    Choices,
    Inputs,
    Likelihood,
    choice_requests,
    likelihood_of,
    requests_for,
)
from quire.errors import QuireError, RequestFailed
from quire.queue.async_broker import AsyncBroker, connect_async
from quire.queue.async_shard import taking_turns
from quire.queue.request.status import RequestStatus
from quire.queue.submit.messages import Item, must_ask_clock, ready_messages
from quire.queue.submit.routing import check_group_name, shard_of
from quire.queue.workers.workers import adapters_of, kinds_of, models_of
from quire.tracing import NO_HEADERS, sending
from quire.transport.procedure import run_async
from quire.wire.arguments import QueueSettings, RequestArguments, RequestOptions
from quire.wire.choices import choices_of
from quire.wire.ends import End
from quire.wire.message import Message
from quire.wire.output import Completion, State, TokenChunk

__all__ = ["AsyncClient", "AsyncGroupHandle", "AsyncHandle"]


class AsyncClient:
    """Talks to one queue from one event loop.

    `broker` is a Redis URL, a connection from `connect_async`, or an AsyncBroker with its own
    settings. Nothing is sent before the first call. `close` closes only a connection that this
    client has made. All methods may raise BrokerUnavailable. For `shards` and `settings` see
    Client.
    """

    def __init__(
        self,
        broker: str | redis.asyncio.Redis | AsyncBroker = DEFAULT_URL,
        *,
        queue: str = "default",
        tenant: str = "default",
        shards: int = 1,
        **settings: Unpack[QueueSettings],
    ) -> None:
        check_shards(shards, is_broker=isinstance(broker, AsyncBroker), settings=settings)
        self._owned = connect_async(broker) if isinstance(broker, str) else None
        connection = self._owned or broker
        self._owns_brokers = isinstance(connection, redis.asyncio.Redis)
        if isinstance(connection, AsyncBroker):
            self.brokers = [connection]
        elif not isinstance(connection, redis.asyncio.Redis):
            raise TypeError(
                "an AsyncClient takes a url, a connection made with `connect_async`, or an "
                "AsyncBroker"
            )
        else:
            self.brokers = [
                AsyncBroker(connection, queue=queue, shard=shard, **settings)
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
        """Ends the tasks and closes the connection of this client. May be repeated."""
        if self._owns_brokers:
            for broker in self.brokers:
                await broker.close()
        if self._owned is not None:
            await self._owned.aclose()

    async def submit(
        self, prompt: str | Sequence[int] | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncHandle:
        """See `Client.submit`."""
        return (await self.submit_many([{"prompt": prompt, **options}]))[0]

    @overload
    async def submit_many(self, requests: Iterable[Item]) -> list[AsyncHandle]: ...

    @overload
    async def submit_many(self, requests: Iterable[Item], *, group: str) -> AsyncGroupHandle: ...

    async def submit_many(
        self,
        requests: Iterable[Item],
        *,
        group: str | None = None,
    ) -> list[AsyncHandle] | AsyncGroupHandle:
        """See `Client.submit_many`."""
        name = None if group is None else check_group_name(group)
        given = list(requests)
        with self._sending(len(given)) as headers:
            messages = await self._ready(given, group=name, headers=headers)
            handles = await self._submit(messages, given)
        return handles if name is None else self.attach_group(name)

    async def submit_kept(self, requests: Sequence[Item], kept: bytes) -> list[AsyncHandle]:
        """Like `submit_many`; `kept` is stored with the first request, for as long as its results.

        Only the call that creates the request stores it. Workers never read it.
        """
        with self._sending(len(requests)) as headers:
            first, *others = await self._ready(requests, headers=headers)
            return await self._submit([replace(first, kept=kept), *others], requests)

    async def submit_choices(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        n: int,
        **options: Unpack[RequestOptions],
    ) -> list[AsyncHandle]:
        """See `Client.submit_choices`."""
        arguments: RequestArguments = {"prompt": prompt, **options}
        with self._sending(n) as headers:
            (message,) = await self._ready([arguments], headers=headers)
            messages = await taking_turns(choices_of(message.request, n))
            return await self._submit(messages, [arguments] * n)

    async def embed(
        self, inputs: Inputs, *, timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> list[list[float]]:
        """See `Client.embed`."""
        ends = await self._ends_of_all(requests_for(inputs, options), timeout)
        return [one.embedding for one in ends]

    async def likelihoods(
        self,
        prompt: str | Sequence[int],
        choices: Choices,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Likelihood]:
        """See `Client.likelihoods`."""
        ends = await self._ends_of_all(choice_requests(prompt, choices, options), timeout)
        return list(map(likelihood_of, choices, ends))

    async def _ends_of_all(
        self, requests: list[RequestArguments], timeout: float | None
    ) -> list[Completion]:
        """See `Client._ends_of_all`."""
        handles = await self.submit_many(requests)
        waits = [asyncio.ensure_future(one.result(timeout=timeout)) for one in handles]
        try:
            return [await wait for wait in waits]
        except RequestFailed:
            for one in handles:
                with contextlib.suppress(QuireError):
                    await one.cancel()
            raise
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def attach(self, request_id: str) -> AsyncHandle:
        """A handle to a request submitted elsewhere or earlier. Nothing is sent yet."""
        return AsyncHandle(self.broker_of(request_id), request_id)

    def attach_group(self, group: str) -> AsyncGroupHandle:
        """A handle to a group submitted elsewhere or earlier. Nothing is sent yet."""
        return AsyncGroupHandle(self.brokers, group)

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
        return await self.broker_of(request_id).cancel(request_id)

    async def status(self, request_id: str) -> RequestStatus:
        """A snapshot of the request. UnknownRequest."""
        return await self.broker_of(request_id).status(request_id)

    def ends(
        self,
        *,
        after: str = "",
        group: str | None = None,
        consumer: str | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[End]:
        """See `Client.ends`."""
        reading = reading_of(
            self.brokers, after=after, group=group, consumer=consumer, timeout=timeout
        )
        return self._ends(reading)

    async def _ends(self, reading: EndsReading | SinkReading) -> AsyncIterator[End]:
        ends = reading.ends()
        try:
            while (end := await run_async(ends, in_loop)) is not None:
                yield end
        finally:
            # Without it, the last ends come again.
            with contextlib.suppress(QuireError):
                await run_async(reading.acknowledge(), in_loop)

    async def kept(self, request_id: str) -> bytes | None:
        """What was kept with the request by `submit_kept`; None without it or the request."""
        return await self.broker_of(request_id).kept(request_id)

    async def discard(self, request_id: str) -> State:
        """Delete what was kept with a request, and after its end its results; see Broker."""
        return await self.broker_of(request_id).discard(request_id)

    async def models(self) -> list[str]:
        """See `Client.models`."""
        return models_of([info for broker in self.brokers for info in await broker.workers()])

    async def adapters(self) -> dict[str, list[str]]:
        """See `Client.adapters`."""
        return adapters_of([info for broker in self.brokers for info in await broker.workers()])

    async def kinds(self) -> dict[str, str]:
        """See `Client.kinds`."""
        return kinds_of([info for broker in self.brokers for info in await broker.workers()])

    async def now_ms(self) -> int:
        """See `Client.now_ms`."""
        return await self.brokers[0].now_ms()

    def broker_of(self, request_id: str) -> AsyncBroker:
        return self.brokers[shard_of(request_id, len(self.brokers))]

    def _sending(self, num_requests: int) -> AbstractContextManager[Mapping[str, str]]:
        return sending(self.brokers[0].keys.queue, num_requests=num_requests)

    async def _ready(
        self,
        items: Sequence[Item],
        *,
        group: str | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> list[Message]:
        """The checked messages, with their final ids."""
        now_ms = await self.brokers[0].now_ms() if must_ask_clock(items) else None
        num_shards = len(self.brokers)
        return await taking_turns(
            ready_messages(
                items,
                tenant=self._tenant,
                now_ms=now_ms,
                num_shards=num_shards,
                group=group,
                headers=headers,
            )
        )

    async def _submit(
        self,
        messages: Sequence[Message],
        given: Sequence[Item],
    ) -> list[AsyncHandle]:
        ids = await run_async(submitting(self.brokers, messages, given), in_loop)
        return [AsyncHandle(self.broker_of(name), name, known=True) for name in ids]
