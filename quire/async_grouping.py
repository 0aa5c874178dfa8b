"""What a coroutine asks of the broker about groups; the counterpart of grouping.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.async_shard import AsyncShard
from quire.calls import cancel_call
from quire.grouping import FIRST_POSITION, MAX_ENDS_PER_READ, GroupEnd
from quire.output import State
from quire.output_log import entries_by_stream
from quire.producing import Ask
from quire.script_runner import raise_if_error


class AsyncGrouping(AsyncShard):
    """The side of an AsyncBroker that knows groups; see `Grouping` for each method."""

    async def group_counts(self, group: str) -> dict[State, int]:
        """See `Broker.group_counts`."""
        key, _, _ = self.keys.of_group(group)
        fields: Any = await self._call(lambda: self._connection.hgetall(key))
        counts = {State(name.decode()): int(count) for name, count in fields.items()}
        return {state: count for state, count in counts.items() if count}

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

        async def read() -> Any:
            block = None
            if block_seconds is not None:
                block = max(1, int(1000 * min(block_seconds, self._longest_block)))
            return await self._connection.xread({key: after}, count=MAX_ENDS_PER_READ, block=block)

        # A read that waits must not take the turn of calls that are answered at once.
        reply = await (self._call(read) if block_seconds is None else self._retrying(read))
        return [
            GroupEnd(entry_id.decode(), fields[b"id"].decode(), State(fields[b"state"].decode()))
            for _, entries in entries_by_stream(reply)
            for entry_id, fields in entries
        ]

    async def cancel_many(self, request_ids: Sequence[str]) -> dict[str, State]:
        """See `Broker.cancel_many`."""
        calls = [cancel_call(self.keys, request_id) for request_id in request_ids]
        replies = [raise_if_error(reply) for reply in await self._run(Ask("cancel", calls))]
        return {
            request_id: State(reply.decode())
            for request_id, reply in zip(request_ids, replies, strict=True)
            if reply
        }
