"""The shared reader of an event loop: one task and one connection for all coroutines that wait.

client/reader.py is the same for threads. waits.py, which both use, decides which logs are read
together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from quire.errors import BrokerUnavailable, QuireError
from quire.keys import Keys
from quire.queue.publish.output_log import OutputRead
from quire.queue.publish.waits import (
    MAX_ENTRIES_PER_STREAM,
    RETURN_SECONDS,
    SWEEP_SECONDS,
    Wait,
    WaitingReads,
    Waits,
    lowest_of,
)
from quire.transport.concurrency_async import heeding_cancels
from quire.transport.procedure import RoundTrip, run_async, send_async

#: How long `close` waits for the reading task before it is cancelled.
CLOSE_SECONDS = 1.0


class AsyncReader:
    """The one task that reads for all waits of this loop. It ends when no wait is left."""

    #: The most entries of one log that one read takes.
    max_entries = MAX_ENTRIES_PER_STREAM

    def __init__(
        self,
        connection: redis.asyncio.Redis,
        keys: Keys,
        *,
        longest_block: float,
        retrying: Callable[..., Awaitable[Any]],
    ) -> None:
        self._connection = connection
        self._retrying = retrying
        self._reads = WaitingReads(keys, longest_block=longest_block)
        self._waits = Waits()
        self._task: asyncio.Task[None] | None = None
        self._is_blocked = False

    async def read(self, seen: Mapping[str, int], *, timeout: float) -> dict[str, OutputRead]:
        """What is added to these logs within `timeout` seconds, after the tokens already seen.

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
        """Ends the task, and every wait with BrokerUnavailable."""
        if self._task is None:
            return
        self._waits.fail(BrokerUnavailable("the client was closed"))
        # Cancelling a read closes its connection, so the task is woken and ends by itself.
        await self._wake()
        _, running = await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
        for task in running:
            task.cancel()

    async def _run(self) -> None:
        try:
            while self._waits:
                await self._read_or_fail()
        finally:
            # Waits are left only after a bug in this class. Fail them, because the task has ended.
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
        # There was no await since the groups were made, so later waits see `_is_blocked`.
        reads = await run_async(self._reads.reading(groups), self._do)
        self._waits.deliver(reads, lowest_of(groups))
        if not reads and len(groups) > 1:
            await asyncio.sleep(SWEEP_SECONDS)
        return bool(reads)

    async def _do(self, trip: RoundTrip) -> list[Any]:
        self._is_blocked = trip.wait_seconds > 0
        once = partial(send_async, self._connection, trip)
        try:
            replies: list[Any] = await self._retrying(once, wait_seconds=trip.wait_seconds)
        finally:
            self._is_blocked = False
        return replies

    async def _wake(self) -> None:
        if not self._is_blocked:
            return
        # One entry wakes the reader; waits that are added until then need not write another one.
        self._is_blocked = False
        # If this fails (no memory, for example), the new wait begins after the blocked read.
        with contextlib.suppress(RedisError):
            await heeding_cancels(send_async(self._connection, self._reads.waking()))
