"""How an event loop reaches one queue shard; what it asks there is AsyncBroker's.

What is asked of Redis, and what its answers mean, is the same code as behind `Broker`; here is only
what waits. Like there, nothing is repeated but transitions that may be, for a bounded time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import redis.asyncio
from redis.exceptions import RedisError

from quire.broker import reading
from quire.broker.producing import Ask
from quire.keys import Keys
from quire.transport.connection import Attempts, is_of_replica, longest_block_of
from quire.transport.durability import DurabilityRules
from quire.transport.patience import OUTAGE_RETRIES
from quire.transport.procedure import Procedure, RoundTrip, run_async, send_async
from quire.transport.script_runner import (
    Argument,
    ScriptArguments,
    arguments_of,
    load_source,
    pipelines_of,
    script_error,
    sending,
)

#: Tries of calls that are under way at once; each takes a connection. Others wait for their turn.
MAX_CALLS = 8

#: How many requests are made ready before others of the loop have their turn: some milliseconds.
REQUESTS_PER_TURN = 64

_Result = TypeVar("_Result")


async def taking_turns(items: Iterable[_Result]) -> list[_Result]:
    """The items, which are made as they are asked for; the others of the loop get on meanwhile."""
    made: list[_Result] = []
    for item in items:
        made.append(item)
        if len(made) % REQUESTS_PER_TURN == 0:
            await asyncio.sleep(0)
    return made


async def heeding_cancels(awaitable: Awaitable[_Result]) -> _Result:
    """Awaits it; CancelledError where it has swallowed one.

    redis-py sends by `asyncio.wait_for`, and that of Python 3.11 drops a cancellation that comes
    just when all is sent. Who was cancelled would go on: a timeout would have no effect.
    """
    task = asyncio.current_task()
    assert task is not None, "only a task awaits"
    before = task.cancelling()
    try:
        return await awaitable
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


class AsyncShard:
    """The base of AsyncBroker. `settings` are the arguments every transition begins with."""

    def __init__(
        self,
        connection: redis.asyncio.Redis,
        keys: Keys,
        *,
        settings: Sequence[Argument],
        retry_seconds: float,
        durable: bool,
    ) -> None:
        self.keys = keys
        self._connection = connection
        self._settings = tuple(settings)
        self._retry_seconds = retry_seconds
        #: For how long a wait without a timeout bears that Redis does not answer.
        self.outage_seconds = OUTAGE_RETRIES * retry_seconds
        self._longest_block = longest_block_of(connection)
        self._durability = (
            DurabilityRules(keys, longest_seconds=self._longest_block) if durable else None
        )
        self._turns = asyncio.Semaphore(MAX_CALLS)

    async def now_ms(self) -> int:
        """See `Broker.now_ms`."""
        return await self._run(reading.now_ms())

    async def _run(self, procedure: Procedure[_Result]) -> _Result:
        return await run_async(procedure, self._do)

    async def _do(self, step: Ask | RoundTrip) -> list[Any]:
        if isinstance(step, Ask):
            return await self._ask(step)
        once = partial(self._look, step)
        if step.wait_seconds:
            # A read that waits must not take the turn of calls that are answered at once.
            return await self._retrying(once, wait_seconds=step.wait_seconds)
        return await self._call(once)

    async def _look(self, trip: RoundTrip) -> list[Any]:
        return await send_async(self._connection, trip)

    async def _ask(self, ask: Ask) -> list[Any]:
        durability = self._durability if ask.must_be_durable else None
        if durability:
            await self._call(lambda: run_async(durability.probing(), self._look))
        source, replies = load_source(ask.transition), list[Any]()
        for part in pipelines_of(ask.calls):
            made = [arguments_of(call, self._settings) for call in part]
            replies += await self._call(partial(self._send, source, made, durability))
        return [script_error(r) if isinstance(r, RedisError) else r for r in replies]

    async def _send(
        self, source: str, made: Sequence[ScriptArguments], durability: DurabilityRules | None
    ) -> list[Any]:
        return await run_async(sending(source, made, durability), self._look)

    async def _call(self, operation: Callable[[], Awaitable[_Result]]) -> _Result:
        # A turn is one try, and the time for all tries counts from here: when Redis is away all
        # callers learn it together, instead of each after the tries of those before it.
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
                    await self._connection.connection_pool.disconnect(inuse_connections=False)
                pause = attempts.pause_after(error)
            await asyncio.sleep(pause)
