"""The broker of an event loop: the transitions a producer needs, and reads that share an XREAD."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from quire.async_grouping import AsyncGrouping
from quire.connection import (
    MAX_BLOCK_SECONDS,
    connection_settings,
    longest_block_of,
    refuse_unknown_options,
)
from quire.errors import BrokerUnavailable, QuireError, UnknownRequest
from quire.keys import Keys
from quire.output import State
from quire.output_log import (
    OutputRead,
    entries_by_stream,
    log_positions,
    logs_in,
    reads_or_error,
)
from quire.producing import cancelling, script_settings, submitting
from quire.protocol import GenerationRequest
from quire.replies import status_of
from quire.sentinel import connect_through_sentinels, is_sentinel_url
from quire.transitions import RequestStatus, Submitted
from quire.waits import (
    MAX_ENTRIES_PER_STREAM,
    RETURN_SECONDS,
    SWEEP_SECONDS,
    WAKE_EXPIRY_MS,
    Wait,
    Waits,
)

#: How long `close` waits for the reading task before it is cancelled.
CLOSE_SECONDS = 1.0


def connect_async(url: str, *, block_seconds: float = MAX_BLOCK_SECONDS) -> redis.asyncio.Redis:
    """The counterpart of `quire.connect`, under the same discipline. Nothing is sent yet.

    ValueError for a url that cannot be right.
    """
    settings = connection_settings(url, block_seconds) | {"retry": Retry(NoBackoff(), 0)}
    if is_sentinel_url(url):
        client: redis.asyncio.Redis = connect_through_sentinels(url, settings, make=Sentinel)
    else:
        client = redis.asyncio.Redis.from_url(url, **settings)
    refuse_unknown_options(client)
    return client


class AsyncBroker(AsyncGrouping):
    """What a producer asks of one queue shard, over one redis.asyncio connection pool.

    For one event loop. The reads of all its coroutines share one connection and few XREADs, however
    many logs are followed. The settings are those of `Broker`.
    """

    def __init__(
        self,
        connection: redis.asyncio.Redis,
        *,
        queue: str = "default",
        shard: int = 0,
        lease_seconds: float = 10.0,
        max_attempts: int = 5,
        max_queue_seconds: float = 86_400.0,
        retention_seconds: float = 3600.0,
        max_backlog: int | None = None,
        retry_seconds: float = 2.0,
        durable: bool = False,
    ) -> None:
        settings = script_settings(
            lease_seconds=lease_seconds,
            max_attempts=max_attempts,
            max_queue_seconds=max_queue_seconds,
            retention_seconds=retention_seconds,
            max_backlog=max_backlog,
        )
        super().__init__(
            connection,
            Keys(queue, shard),
            settings=settings,
            retry_seconds=retry_seconds,
            durable=durable,
        )
        self._reader = _Reader(connection, self.keys, retrying=self._retrying)

    async def submit_many(self, requests: Sequence[GenerationRequest]) -> list[Submitted]:
        """See `Broker.submit_many`."""
        return await self._hold(submitting(self.keys, requests))

    async def cancel(self, request_id: str) -> State:
        """See `Broker.cancel`."""
        return await self._hold(cancelling(self.keys, request_id))

    async def status(self, request_id: str) -> RequestStatus:
        """See `Broker.status`."""
        place, fields = await self._call(partial(self._look, request_id))
        if not fields:
            raise UnknownRequest(request_id)
        return status_of(request_id, fields, place=place)

    async def _look(self, request_id: str) -> list[Any]:
        async with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.hget(self.keys.place, request_id)
            pipeline.hgetall(self.keys.request(request_id))
            return list(await pipeline.execute())

    async def read_output(
        self, seen: Mapping[str, int], *, block_seconds: float | None = None
    ) -> dict[str, OutputRead]:
        """See `Broker.read_output`; a read that waits shares its XREAD with all others."""
        if not seen:
            return {}
        if block_seconds is not None:
            return await self._reader.read(seen, timeout=min(block_seconds, MAX_BLOCK_SECONDS))
        after = log_positions(self.keys, seen)
        reply = await self._call(
            lambda: self._connection.xread(after, count=MAX_ENTRIES_PER_STREAM)
        )
        return reads_or_error(logs_in(reply, self.keys, seen))

    async def close(self) -> None:
        """Ends the reads; BrokerUnavailable for those that wait. The connection stays open."""
        await self._reader.close()


class _Reader:
    """The one task that reads for all waits of this loop. It lives as long as someone waits."""

    def __init__(
        self,
        connection: redis.asyncio.Redis,
        keys: Keys,
        *,
        retrying: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]],
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._retrying = retrying
        self._longest_block = longest_block_of(connection)
        self._waits = Waits()
        self._task: asyncio.Task[None] | None = None
        self._wake_stream = keys.wake(secrets.token_hex(8))
        self._wake_position: bytes | str = "0-0"
        self._is_blocked = False

    async def read(self, seen: Mapping[str, int], *, timeout: float) -> dict[str, OutputRead]:
        news = asyncio.Event()
        wait = Wait(seen, news.set)
        self._waits.add(wait)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="quire-reader")
        try:
            async with asyncio.timeout(timeout):
                await self._wake()
                await news.wait()
        except TimeoutError:
            pass
        finally:
            self._waits.discard(wait)
        if wait.error is not None:
            raise wait.error
        return wait.news

    async def close(self) -> None:
        if self._task is None:
            return
        self._waits.fail(BrokerUnavailable("the client was closed"))
        # A read that is cancelled costs its connection, so the task is woken and ends by itself.
        await self._wake()
        _, running = await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
        for task in running:
            task.cancel()

    async def _run(self) -> None:
        try:
            while self._waits:
                await self._read_or_fail()
        finally:
            # Only those a mistake of ours has left behind; nobody may wait for a task that is gone.
            self._waits.fail(BrokerUnavailable("the task that reads has ended"))

    async def _read_or_fail(self) -> None:
        try:
            has_news = await self._read_once()
        except QuireError as error:
            self._waits.fail(error)
            has_news = True
        await asyncio.sleep(RETURN_SECONDS if has_news else 0)

    async def _read_once(self) -> bool:
        groups = self._waits.groups()
        if len(groups) > 1:
            replies = await self._retrying(partial(self._sweep, groups))
        else:
            replies = [await self._block(groups[0])]
        reads = dict[str, Any]()
        for seen, reply in zip(groups, replies, strict=True):
            reads |= logs_in(reply, self._keys, seen)
        self._waits.deliver(reads)
        if not reads and len(groups) > 1:
            await asyncio.sleep(SWEEP_SECONDS)
        return bool(reads)

    async def _sweep(self, groups: Sequence[Mapping[str, int]]) -> list[Any]:
        async with self._connection.pipeline(transaction=False) as pipeline:
            for seen in groups:
                pipeline.xread(log_positions(self._keys, seen), count=MAX_ENTRIES_PER_STREAM)
            return list(await pipeline.execute())

    async def _block(self, seen: Mapping[str, int]) -> Any:
        after = log_positions(self._keys, seen)
        after[self._wake_stream] = self._wake_position
        block_ms = int(self._longest_block * 1000)
        # Nothing has awaited since the groups were made, so every later wait finds this set.
        self._is_blocked = True
        try:
            reply = await self._retrying(
                lambda: self._connection.xread(after, count=MAX_ENTRIES_PER_STREAM, block=block_ms)
            )
        finally:
            self._is_blocked = False
        for stream, entries in entries_by_stream(reply):
            if stream == self._wake_stream.encode():
                self._wake_position = entries[-1][0]
        return reply

    async def _wake(self) -> None:
        if not self._is_blocked:
            return
        # One entry wakes it; those that come until it has woken need not write another.
        self._is_blocked = False
        # Without it (no memory left, say) the new wait begins when the blocked read has ended.
        with contextlib.suppress(RedisError):
            # Not a transaction: those who only submit may not open one.
            async with self._connection.pipeline(transaction=False) as pipeline:
                pipeline.xadd(self._wake_stream, {"more": "1"}, maxlen=1, approximate=False)
                pipeline.pexpire(self._wake_stream, WAKE_EXPIRY_MS)
                await pipeline.execute()
