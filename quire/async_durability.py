"""Lets a coroutine hear of a write only when it is on the disk of the server; see durability.py."""

from __future__ import annotations

from typing import Any, cast

import redis.asyncio
from redis.exceptions import RedisError

from quire.connection import TRANSIENT
from quire.durability import Durability
from quire.errors import DurabilityUnavailable
from quire.keys import Keys


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
            self._waits = True
        except TRANSIENT:
            raise
        except RedisError as error:
            if "unknown command" not in str(error).lower():
                raise DurabilityUnavailable(str(error)) from error
            if not await self._writes_every_command():
                raise DurabilityUnavailable(
                    "the server has no WAITAOF (Redis 7.2) and does not write with "
                    "`appendfsync always`"
                ) from error
            self._waits = False

    async def _writes_every_command(self) -> bool:
        try:
            appends = await self._server.config_get("appendonly", "appendfsync")
        except TRANSIENT:
            raise
        except RedisError:
            # Not allowed, or no such command: then nothing is known, and nothing promised.
            return False
        found = {_text(name): _text(value) for name, value in appends.items()}
        return found == {"appendonly": "yes", "appendfsync": "always"}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
