"""The broker for an event loop: the transitions of a producer, and reads that share an XREAD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import redis.asyncio

from quire.keys import Keys
from quire.queue.ends import telling
from quire.queue.ends.telling import Delivery
from quire.queue.groups import grouping
from quire.queue.groups.grouping import FIRST_POSITION, GroupEnd, GroupProgress
from quire.queue.publish import output_log
from quire.queue.publish.output_log import OutputRead
from quire.queue.publish.waits import MAX_ENTRIES_PER_STREAM
from quire.queue.reader_async import AsyncReader
from quire.queue.request.arguments import script_settings
from quire.queue.request.status import RequestStatus, kept, status
from quire.queue.shard_async import AsyncShard
from quire.queue.streams import at_most
from quire.queue.submit.cancel import cancel_many, cancelling, discarding
from quire.queue.submit.submit import Submitted, submit_call, submitting
from quire.queue.workers.absence import absence
from quire.queue.workers.workers import WorkerInfo, workers
from quire.transport.concurrency_async import list_of
from quire.transport.connection import (
    MAX_BLOCK_SECONDS,
)
from quire.wire.ends import End
from quire.wire.message import Message
from quire.wire.output import State
from quire.wire.protocol import GenerationRequest


class AsyncBroker(AsyncShard):
    """The producer's side of one queue shard, over one redis.asyncio connection pool.

    For one event loop. The waiting reads of all coroutines share one connection and few XREADs,
    however many logs they follow. The settings are those of `Broker`.
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
        self._reader = AsyncReader(self.connection, self.keys, retrying=self._retrying)

    async def submit_many(self, requests: Sequence[GenerationRequest]) -> list[Submitted]:
        """See `Broker.submit_many`."""
        return await self.submit_messages(await list_of(map(Message.of, requests)))

    async def submit_messages(self, messages: Sequence[Message]) -> list[Submitted]:
        """See `Broker.submit_messages`."""
        calls = await list_of(submit_call(self.keys, message) for message in messages)
        return await self.run(submitting(self.keys, messages, calls=calls))

    async def cancel(self, request_id: str) -> State:
        """See `Broker.cancel`."""
        return await self.run(cancelling(self.keys, request_id))

    async def discard(self, request_id: str) -> State:
        """See `Broker.discard`."""
        return await self.run(discarding(self.keys, request_id))

    async def end_overdue(self, request_ids: Sequence[str]) -> dict[str, State]:
        """See `Broker.end_overdue`."""
        return await self.run(grouping.end_overdue(self.keys, request_ids))

    async def overdue(self, group: str) -> list[str]:
        """See `Broker.overdue`."""
        return await self.run(grouping.overdue(self.keys, group))

    async def status(self, request_id: str) -> RequestStatus:
        """See `Broker.status`."""
        return await self.run(status(self.keys, request_id))

    async def kept(self, request_id: str) -> bytes | None:
        """See `Broker.kept`."""
        return await self.run(kept(self.keys, request_id))

    async def read_output(
        self, seen: Mapping[str, int], *, block_seconds: float | None = None
    ) -> dict[str, OutputRead]:
        """See `Broker.read_output`. A read that waits shares its XREAD with all others."""
        if block_seconds is not None and seen:
            return await self._reader.read(seen, timeout=min(block_seconds, MAX_BLOCK_SECONDS))
        return await self.run(output_log.read_output(self.keys, seen, count=MAX_ENTRIES_PER_STREAM))

    async def workers(self) -> list[WorkerInfo]:
        """See `Broker.workers`."""
        return await self.run(workers(self.keys))

    async def absence(self) -> str | None:
        """See `Broker.absence`."""
        return await self.run(absence(self.keys))

    async def close(self) -> None:
        """Ends all waiting reads with BrokerUnavailable. The connection stays open."""
        await self._reader.close()

    # Groups; see `Grouping`.

    async def group_counts(self, group: str) -> dict[State, int]:
        """See `Broker.group_counts`."""
        return await self.run(grouping.group_counts(self.keys, group))

    async def group_progress(self, group: str) -> GroupProgress:
        """See `Broker.group_progress`."""
        return await self.run(grouping.group_progress(self.keys, group))

    async def open_members(self, group: str) -> list[str]:
        """See `Broker.open_members`."""
        return await self.run(grouping.open_members(self.keys, group))

    async def num_open_members(self, group: str) -> int:
        """See `Broker.num_open_members`."""
        return await self.run(grouping.num_open_members(self.keys, group))

    async def read_ends(
        self, group: str, *, after: str = FIRST_POSITION, block_seconds: float | None = None
    ) -> list[GroupEnd]:
        """See `Broker.read_ends`. A read that waits uses a connection of its own meanwhile."""
        block = at_most(block_seconds, self._longest_block)
        return await self.run(
            grouping.read_ends(self.keys, group, after=after, block_seconds=block)
        )

    async def cancel_many(self, request_ids: Sequence[str]) -> dict[str, State]:
        """See `Broker.cancel_many`."""
        return await self.run(cancel_many(self.keys, request_ids))

    # The ends of the queue; see `Telling`. A read that waits uses a connection of its own.

    async def told(self, *, after: str, block_seconds: float | None = None) -> list[End]:
        """See `Broker.told`."""
        block = at_most(block_seconds, self._longest_block)
        return await self.run(telling.told(self.keys, after=after, block_seconds=block))

    async def deliver(
        self, group: str, consumer: str, *, block_seconds: float | None = None
    ) -> Delivery:
        """See `Broker.deliver`."""
        block = at_most(block_seconds, self._longest_block)
        return await self.run(telling.deliver(self.keys, group, consumer, block_seconds=block))

    async def delivered(self, group: str, consumer: str) -> Delivery:
        """See `Broker.delivered`."""
        return await self.run(telling.delivered(self.keys, group, consumer))

    async def take_over(self, group: str, consumer: str, *, idle_seconds: float) -> Delivery:
        """See `Broker.take_over`."""
        taking = telling.take_over(self.keys, group, consumer, idle_seconds=idle_seconds)
        return await self.run(taking)

    async def acknowledge(self, group: str, positions: Sequence[str]) -> None:
        """See `Broker.acknowledge`."""
        await self.run(telling.acknowledge(self.keys, group, positions))
