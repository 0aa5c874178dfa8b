"""The only code that repeats an operation against Redis."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TypeVar

import redis.asyncio
from redis.exceptions import RedisError

from quire.transport.concurrency_async import heeding_cancels, limited, pause
from quire.transport.connection import Attempts, is_of_replica

#: The most calls that are sent at the same time; each uses a connection. Others wait.
MAX_CALLS = 8

_Result = TypeVar("_Result")


class AsyncRetrying:
    """Runs operations against Redis, and raises QuireErrors in place of redis-py's errors.

    A repeatable operation is retried after a transient error, with growing pauses, for at most
    `seconds` in all. Then BrokerUnavailable is raised; for other operations at the first error. The
    time for which an operation may block on the server does not count.

    If the server is a replica, idle connections of `connection` are closed, so that the next
    attempt resolves the url again.
    """

    def __init__(self, seconds: float, connection: redis.asyncio.Redis | None = None) -> None:
        self.seconds = seconds
        self._connection = connection
        #: What each attempt holds that Redis answers at once.
        self.turns = limited(MAX_CALLS)

    async def __call__(
        self,
        operation: Callable[[], Awaitable[_Result]],
        *,
        repeatable: bool = True,
        wait_seconds: float = 0.0,
    ) -> _Result:
        # The time counts from here, and not from an attempt's turn. So all callers fail at the same
        # time in an outage, and not one after the other.
        attempts = Attempts(self.seconds if repeatable else 0.0, wait_seconds=wait_seconds)
        # A read that waits must not hold up calls that Redis answers at once.
        turns = nullcontext() if wait_seconds else self.turns
        while True:
            try:
                async with turns:
                    return await heeding_cancels(operation())
            except RedisError as error:
                if self._connection is not None and is_of_replica(error):
                    pool = self._connection.connection_pool
                    await pool.disconnect(inuse_connections=False)
                seconds = attempts.pause_after(error)
            await pause(seconds)
