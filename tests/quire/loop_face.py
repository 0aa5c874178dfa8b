"""A blocking face for AsyncClient, so that the tests of `Client` can be held against it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import redis
import redis.asyncio
from fakeredis import FakeAsyncRedis, FakeRedis

from quire.client.client_async import AsyncClient, AsyncHandle
from quire.client.group_handle_async import AsyncGroupHandle
from quire.transport.connection_async import connect_async


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class BlockingClient:
    """AsyncClient with the signatures of Client."""

    def __init__(self, loop: LoopThread, client: AsyncClient) -> None:
        self._loop = loop
        self._client = client

    def submit(self, *arguments: Any, **options: Any) -> BlockingHandle:
        return self._face(self._loop.run(self._client.submit(*arguments, **options)))

    def submit_many(
        self, requests: Any, *, group: str | None = None
    ) -> list[BlockingHandle] | BlockingGroup:
        if group is not None:
            submitted = self._client.submit_many(requests, group=group)
            return BlockingGroup(self._loop, self._loop.run(submitted))
        return [self._face(h) for h in self._loop.run(self._client.submit_many(requests))]

    def submit_choices(self, *arguments: Any, **options: Any) -> list[BlockingHandle]:
        handles = self._loop.run(self._client.submit_choices(*arguments, **options))
        return [self._face(handle) for handle in handles]

    def attach(self, request_id: str) -> BlockingHandle:
        return self._face(self._client.attach(request_id))

    def attach_group(self, group: str) -> BlockingGroup:
        return BlockingGroup(self._loop, self._client.attach_group(group))

    def stream(self, request_id: str, **options: Any) -> Iterator[Any]:
        return self.attach(request_id).stream(**options)

    def result(self, request_id: str, **options: Any) -> Any:
        return self._loop.run(self._client.result(request_id, **options))

    def cancel(self, request_id: str) -> Any:
        return self._loop.run(self._client.cancel(request_id))

    def status(self, request_id: str) -> Any:
        return self._loop.run(self._client.status(request_id))

    def models(self) -> Any:
        return self._loop.run(self._client.models())

    def adapters(self) -> Any:
        return self._loop.run(self._client.adapters())

    def now_ms(self) -> Any:
        return self._loop.run(self._client.now_ms())

    def _face(self, handle: AsyncHandle) -> BlockingHandle:
        return BlockingHandle(self._loop, handle)


class BlockingHandle:
    """AsyncHandle with the signatures of Handle."""

    def __init__(self, loop: LoopThread, handle: AsyncHandle) -> None:
        self._loop = loop
        self._handle = handle
        self.request_id = handle.request_id

    def stream(self, **options: Any) -> Iterator[Any]:
        return each(self._loop, self._handle.stream(**options))

    def follow(self, **options: Any) -> Iterator[Any]:
        return each(self._loop, self._handle.follow(**options))

    def result(self, **options: Any) -> Any:
        return self._loop.run(self._handle.result(**options))

    def cancel(self) -> Any:
        return self._loop.run(self._handle.cancel())

    def status(self) -> Any:
        return self._loop.run(self._handle.status())


class BlockingGroup:
    """AsyncGroupHandle with the signatures of GroupHandle."""

    def __init__(self, loop: LoopThread, group: AsyncGroupHandle) -> None:
        self._loop = loop
        self._group = group

    def __repr__(self) -> str:
        return repr(self._group)

    def counts(self) -> Any:
        return self._loop.run(self._group.counts())

    def results(self, **options: Any) -> Iterator[Any]:
        return each(self._loop, self._group.results(**options))

    def wait(self, **options: Any) -> Any:
        return self._loop.run(self._group.wait(**options))

    def cancel(self) -> Any:
        return self._loop.run(self._group.cancel())


def each(loop: LoopThread, items: AsyncIterator[Any]) -> Iterator[Any]:
    """The items of an asynchronous iterator as they come."""
    while True:
        try:
            yield loop.run(anext(items))
        except StopAsyncIteration:
            return


def async_twin(connection: redis.Redis) -> redis.asyncio.Redis:
    """A connection of redis.asyncio to the same server, real or fake."""
    settings = connection.connection_pool.connection_kwargs
    if isinstance(connection, FakeRedis):
        return FakeAsyncRedis(server=settings["server"])
    return connect_async(f"redis://{settings['host']}:{settings['port']}/{settings.get('db', 0)}")


@contextlib.contextmanager
def blocking_client(
    connection: redis.Redis, *, queue: str, shards: int = 1
) -> Iterator[BlockingClient]:
    loop = LoopThread()
    twin = async_twin(connection)
    client = AsyncClient(twin, queue=queue, shards=shards)
    try:
        yield BlockingClient(loop, client)
    finally:
        loop.run(client.close())
        loop.run(twin.aclose())
        loop.close()
