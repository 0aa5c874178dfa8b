"""The broker of an event loop: the transitions a producer needs, and reads that share an XREAD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from quire.broker.absence import absence_in, ask_absence
from quire.broker.async_reader import AsyncReader
from quire.broker.async_shard import AsyncShard, taking_turns
from quire.broker.grouping import (
    FIRST_POSITION,
    MAX_ENDS_PER_READ,
    MAX_LEASES,
    GroupEnd,
    block_ms,
    counts_of,
    ended_of,
    ends_of,
    overdue_in,
    states_of,
)
from quire.broker.producing import Ask, cancelling, script_settings, submitting
from quire.broker.waits import MAX_ENTRIES_PER_STREAM
from quire.errors import UnknownRequest
from quire.keys import Keys
from quire.transitions.calls import MAX_ITEMS_PER_CALL, cancel_call, expire_call, submit_call
from quire.transitions.output_log import OutputRead, log_positions, logs_in
from quire.transitions.replies import readable, status_of, worker_of
from quire.transitions.values import RequestStatus, Submitted, WorkerInfo
from quire.transport.connection import (
    MAX_BLOCK_SECONDS,
    connection_settings,
    refuse_unknown_options,
)
from quire.transport.sentinel import connect_through_sentinels, is_sentinel_url
from quire.wire.message import Message
from quire.wire.output import State
from quire.wire.protocol import GenerationRequest


def connect_async(url: str, *, block_seconds: float = MAX_BLOCK_SECONDS) -> redis.asyncio.Redis:
    """The counterpart of `quire.connect`, under the same discipline. Nothing is sent yet.

    ValueError for a url that cannot be right.
    """
    settings = connection_settings(url, block_seconds) | {"retry": Retry(NoBackoff(), 0)}
    if is_sentinel_url(url):
        client: redis.asyncio.Redis = connect_through_sentinels(url, settings, make=Sentinel)
    else:
        client = redis.asyncio.Redis.from_url(url, **settings)
    refuse_unknown_options(client)
    return client


class AsyncBroker(AsyncShard):
    """What a producer asks of one queue shard, over one redis.asyncio connection pool.

    For one event loop. The reads of all its coroutines share one connection and few XREADs, however
    many logs are followed. The settings are those of `Broker`.
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
        self._reader = AsyncReader(connection, self.keys, retrying=self._retrying)

    async def submit_many(self, requests: Sequence[GenerationRequest]) -> list[Submitted]:
        """See `Broker.submit_many`."""
        return await self.submit_messages(await taking_turns(map(Message.of, requests)))

    async def submit_messages(self, messages: Sequence[Message]) -> list[Submitted]:
        """See `Broker.submit_messages`."""
        calls = await taking_turns(submit_call(self.keys, message) for message in messages)
        return await self._hold(submitting(self.keys, messages, calls=calls))

    async def cancel(self, request_id: str) -> State:
        """See `Broker.cancel`."""
        return await self._hold(cancelling(self.keys, request_id))

    async def end_overdue(self, request_ids: Sequence[str]) -> dict[str, State]:
        """See `Broker.end_overdue`."""
        calls = [expire_call(self.keys, [request_id]) for request_id in request_ids]
        return ended_of(request_ids, await self._run(Ask("expire", calls)))

    async def overdue(self, group: str) -> list[str]:
        """See `Broker.overdue`."""
        now = await self.now_ms()

        async def look() -> list[Any]:
            async with self._connection.pipeline(transaction=False) as pipeline:
                for times, most in (
                    (self.keys.wait, MAX_ITEMS_PER_CALL),
                    (self.keys.lease, MAX_LEASES),
                ):
                    pipeline.zrangebyscore(times, "-inf", now, start=0, num=most)
                return list(await pipeline.execute())

        return overdue_in(await self._call(look), group)

    async def status(self, request_id: str) -> RequestStatus:
        """See `Broker.status`."""
        place, fields, time = await self._call(partial(self._look, request_id))
        if not fields:
            raise UnknownRequest(request_id)
        return status_of(request_id, fields, place=place, time=time)

    async def read_output(
        self, seen: Mapping[str, int], *, block_seconds: float | None = None
    ) -> dict[str, OutputRead]:
        """See `Broker.read_output`; a read that waits shares its XREAD with all others."""
        if not seen:
            return {}
        if block_seconds is not None:
            return await self._reader.read(seen, timeout=min(block_seconds, MAX_BLOCK_SECONDS))
        after = log_positions(self.keys, seen)
        reply = await self._call(
            lambda: self._connection.xread(after, count=MAX_ENTRIES_PER_STREAM)
        )
        return logs_in(reply, self.keys, seen)

    async def workers(self) -> list[WorkerInfo]:
        """See `Broker.workers`."""
        rows: Any = await self._call(lambda: self._connection.hgetall(self.keys.workers))
        now_ms = await self.now_ms()
        found = readable(partial(worker_of, now_ms=now_ms), rows.items())
        return sorted(found, key=lambda info: info.name)

    async def absence(self) -> str | None:
        """See `Broker.absence`."""

        async def look() -> list[Any]:
            async with self._connection.pipeline(transaction=False) as pipeline:
                ask_absence(pipeline, self.keys)
                return list(await pipeline.execute(raise_on_error=False))

        return absence_in(await self._call(look), self.keys)

    async def close(self) -> None:
        """Ends the reads; BrokerUnavailable for those that wait. The connection stays open."""
        await self._reader.close()

    # Of groups; see `Grouping`.

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
        if block is None:
            return ends_of(await self._call(read))
        return ends_of(await self._retrying(read, wait_seconds=block / 1000))

    async def cancel_many(self, request_ids: Sequence[str]) -> dict[str, State]:
        """See `Broker.cancel_many`."""
        calls = [cancel_call(self.keys, request_id) for request_id in request_ids]
        return states_of(request_ids, await self._run(Ask("cancel", calls)))

    async def _look(self, request_id: str) -> list[Any]:
        async with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.hget(self.keys.log_positions, request_id)
            pipeline.hgetall(self.keys.request(request_id))
            pipeline.time()
            return list(await pipeline.execute())
