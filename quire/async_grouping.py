"""What a coroutine asks of the broker about groups; the counterpart of grouping.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.async_shard import AsyncShard
from quire.calls import cancel_call
from quire.grouping import (
    FIRST_POSITION,
    MAX_ENDS_PER_READ,
    GroupEnd,
    block_ms,
    counts_of,
    ends_of,
    states_of,
)
from quire.output import State
from quire.producing import Ask


class AsyncGrouping(AsyncShard):
    """The side of an AsyncBroker that knows groups; see `Grouping` for each method."""

    async def group_counts(self, group: str) -> dict[State, int]:
        """See `Broker.group_counts`."""
        key, _, _ = self.keys.of_group(group)
        fields: Any = await self._call(lambda: self._connection.hgetall(key))
        return counts_of(fields)

    async def open_members(self, group: str) -> list[str]:
        """See `Broker.open_members`."""
        _, key, _ = self.keys.of_group(group)
        members: Any = await self._call(lambda: self._connection.smembers(key))
        return sorted(member.decode() for member in members)

    async def num_open_members(self, group: str) -> int:
        """See `Broker.num_open_members`."""
        _, key, _ = self.keys.of_group(group)
        number: Any = await self._call(lambda: self._connection.scard(key))
        return int(number)

    async def read_ends(
        self, group: str, *, after: str = FIRST_POSITION, block_seconds: float | None = None
    ) -> list[GroupEnd]:
        """See `Broker.read_ends`. One that waits takes a connection for as long."""
        _, _, key = self.keys.of_group(group)

        block = block_ms(block_seconds, longest=self._longest_block)

        async def read() -> Any:
            return await self._connection.xread({key: after}, count=MAX_ENDS_PER_READ, block=block)

        # A read that waits must not take the turn of calls that are answered at once.
        reply = await (self._call(read) if block_seconds is None else self._retrying(read))
        return ends_of(reply)

    async def cancel_many(self, request_ids: Sequence[str]) -> dict[str, State]:
        """See `Broker.cancel_many`."""
        calls = [cancel_call(self.keys, request_id) for request_id in request_ids]
        return states_of(request_ids, await self._run(Ask("cancel", calls)))
