"""The reading of an event loop: one task, one connection, however many coroutines follow a log.

The counterpart of what reader.py does for threads. Who waits for what, and which logs are read
together, is the same code (waits.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from quire.broker.async_shard import heeding_cancels
from quire.broker.waits import (
    MAX_ENTRIES_PER_STREAM,
    RETURN_SECONDS,
    SWEEP_SECONDS,
    WAKE_EXPIRY_MS,
    Wait,
    Waits,
    each_alone,
)
from quire.errors import BrokerUnavailable, QuireError
from quire.keys import Keys
from quire.transitions.output_log import OutputRead, entries_by_stream, log_positions, logs_in
from quire.transport.connection import is_refused, longest_block_of

#: How long `close` waits for the reading task before it is cancelled.
CLOSE_SECONDS = 1.0


class AsyncReader:
    """The one task that reads for all waits of this loop. It lives as long as someone waits."""

    def __init__(
        self,
        connection: redis.asyncio.Redis,
        keys: Keys,
        *,
        retrying: Callable[..., Awaitable[Any]],
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
        """What comes to these logs within `timeout` seconds, beyond the tokens already seen.

        BrokerUnavailable when one of them cannot be read.
        """
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
        """End the task; BrokerUnavailable for those that wait."""
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
        try:
            if len(groups) > 1:
                replies = await self._retrying(partial(self._sweep, groups))
            else:
                replies = [await self._block(groups[0])]
        except BrokerUnavailable as error:
            if not is_refused(error):
                raise
            groups = each_alone(groups)
            replies = [await self._read_alone(seen) for seen in groups]
        has_news = False
        for seen, reply in zip(groups, replies, strict=True):
            reads: dict[str, OutputRead | QuireError]
            if isinstance(reply, QuireError):
                reads = dict.fromkeys(seen, reply)
            else:
                reads = {**logs_in(reply, self._keys, seen)}
            if reads:
                self._waits.deliver(reads, seen)
                has_news = True
        if not has_news and len(groups) > 1:
            await asyncio.sleep(SWEEP_SECONDS)
        return has_news

    async def _sweep(self, groups: Sequence[Mapping[str, int]]) -> list[Any]:
        async with self._connection.pipeline(transaction=False) as pipeline:
            for seen in groups:
                pipeline.xread(log_positions(self._keys, seen), count=MAX_ENTRIES_PER_STREAM)
            return list(await pipeline.execute())

    async def _read_alone(self, seen: Mapping[str, int]) -> Any:
        """The reply for one log, or the error that is its own."""
        try:
            (reply,) = await self._retrying(partial(self._sweep, [seen]))
        except BrokerUnavailable as error:
            if not is_refused(error):
                raise
            return error
        return reply

    async def _block(self, seen: Mapping[str, int]) -> Any:
        after = log_positions(self._keys, seen)
        after[self._wake_stream] = self._wake_position
        block_ms = int(self._longest_block * 1000)
        # Nothing has awaited since the groups were made, so every later wait finds this set.
        self._is_blocked = True
        try:
            reply = await self._retrying(
                lambda: self._connection.xread(after, count=MAX_ENTRIES_PER_STREAM, block=block_ms),
                wait_seconds=self._longest_block,
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
                await heeding_cancels(pipeline.execute())
