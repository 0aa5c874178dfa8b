"""How an event loop reaches one queue shard: the base class of AsyncBroker.

The commands and the meaning of their replies are procedures that Broker runs, too. This module
only sends, waits and retries. As in Broker, only what is idempotent is retried, for a limited time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import redis.asyncio
from redis.exceptions import RedisError

from quire.keys import Keys
from quire.queue import clock, scripts
from quire.transport.connection import Attempts, is_of_replica, longest_block_of
from quire.transport.durability import DurabilityRules
from quire.transport.patience import OUTAGE_RETRIES
from quire.transport.procedure import Procedure, RoundTrip, run_async, send_async
from quire.transport.script_runner import (
    Argument,
    Ask,
    ScriptArguments,
    arguments_of,
    pipelines_of,
    script_error,
    sending,
)
from quire.transport.slots import for_key

#: The most calls that are sent at the same time; each uses a connection. Others wait.
MAX_CALLS = 8

_Result = TypeVar("_Result")


async def heeding_cancels(awaitable: Awaitable[_Result]) -> _Result:
    """Awaits it, and raises CancelledError if it has swallowed a cancellation.

    redis-py sends with `asyncio.wait_for`. In Python 3.11 that drops a cancellation that arrives
    just when everything is sent. The cancelled task would continue, and a timeout have no effect.
    """
    task = asyncio.current_task()
    assert task is not None, "only a task can await"
    before = task.cancelling()
    try:
        return await awaitable
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


class AsyncShard:
    """The base class of AsyncBroker. Every transition's arguments begin with `settings`."""

    def __init__(
        self,
        connection: redis.asyncio.Redis,
        keys: Keys,
        *,
        settings: Sequence[Argument],
        lease_seconds: float,
        retry_seconds: float,
        durable: bool,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self.keys = keys
        self.lease_seconds = lease_seconds
        self._sources = sources or {}
        #: Reaches the node of this shard; for reads that no method has.
        self.connection = connection = for_key(connection, keys.prefix)
        self._settings = tuple(settings)
        self._retry_seconds = retry_seconds
        #: For how long a wait without a timeout continues while Redis does not answer.
        self.outage_seconds = OUTAGE_RETRIES * retry_seconds
        self._longest_block = longest_block_of(connection)
        self._durability = (
            DurabilityRules(keys, longest_seconds=self._longest_block) if durable else None
        )
        self._turns = asyncio.Semaphore(MAX_CALLS)

    async def now_ms(self) -> int:
        """See `Broker.now_ms`."""
        return await self.run(clock.now_ms())

    async def run(self, procedure: Procedure[_Result]) -> _Result:
        """See `Shard.run`."""
        return await run_async(procedure, self._do)

    async def _do(self, step: Ask | RoundTrip) -> list[Any]:
        if isinstance(step, Ask):
            return await self._ask(step)
        once = partial(self._look, step)
        if step.wait_seconds:
            # A read that waits must not hold up calls that Redis answers at once.
            return await self._retrying(once, wait_seconds=step.wait_seconds)
        return await self._call(once)

    async def _look(self, trip: RoundTrip) -> list[Any]:
        return await send_async(self.connection, trip)

    async def _ask(self, ask: Ask) -> list[Any]:
        durability = self._durability if ask.must_be_durable else None
        if durability:
            await self._call(lambda: run_async(durability.probing(), self._look))
        source, replies = (
            self._sources.get(ask.transition) or scripts.load_source(ask.transition),
            list[Any](),
        )
        for part in pipelines_of(ask.calls):
            made = [arguments_of(call, self._settings) for call in part]
            replies += await self._call(partial(self._send, source, made, durability))
        return [script_error(r) if isinstance(r, RedisError) else r for r in replies]

    async def _send(
        self, source: str, made: Sequence[ScriptArguments], durability: DurabilityRules | None
    ) -> list[Any]:
        return await run_async(sending(source, made, durability), self._look)

    async def _call(self, operation: Callable[[], Awaitable[_Result]]) -> _Result:
        # Each attempt takes a turn, but the retry time counts from here. So all callers fail at the
        # same time in an outage, and not one after the other.
        return await self._retrying(partial(self._in_turn, operation))

    async def _in_turn(self, operation: Callable[[], Awaitable[_Result]]) -> _Result:
        async with self._turns:
            return await operation()

    async def _retrying(
        self, operation: Callable[[], Awaitable[_Result]], *, wait_seconds: float = 0.0
    ) -> _Result:
        attempts = Attempts(self._retry_seconds, wait_seconds=wait_seconds)
        while True:
            try:
                return await heeding_cancels(operation())
            except RedisError as error:
                if is_of_replica(error):
                    await self.connection.connection_pool.disconnect(inuse_connections=False)
                pause = attempts.pause_after(error)
            await asyncio.sleep(pause)
