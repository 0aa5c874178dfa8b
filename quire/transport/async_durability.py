"""Lets a coroutine hear of a write only when it is on the disk of the server; see durability.py."""

from __future__ import annotations

from typing import Any, cast

import redis.asyncio
from redis.exceptions import RedisError

from quire.keys import Keys
from quire.transport.connection import TRANSIENT
from quire.transport.durability import (
    MARK_MS,
    Durability,
    require_unknown_command,
    require_write_through,
    requiring_the_mark,
)


class AsyncDurability(Durability):
    """The same promise over a connection of redis.asyncio: `find_out` stands for `require`."""

    def __init__(
        self, connection: redis.asyncio.Redis, keys: Keys, *, longest_seconds: float
    ) -> None:
        # The base speaks to its connection in `require` alone.
        self._server = cast("Any", connection)
        super().__init__(self._server, keys, longest_seconds=longest_seconds)

    async def find_out(self) -> None:
        """DurabilityUnavailable when the server cannot promise anything."""
        if self._waits is not None:
            return
        try:
            await self._server.execute_command("WAITAOF", 1, 0, self._timeout_ms)
        except TRANSIENT:
            raise
        except RedisError as error:
            require_unknown_command(error)
        else:
            with requiring_the_mark(self._mark):
                await self._server.set(self._mark, "", px=MARK_MS)
            self._waits = True
            return
        try:
            found = await self._server.config_get("append*")
        except TRANSIENT:
            raise
        except RedisError:
            found = {}
        require_write_through(found)
        self._waits = False
