"""What every role has: how it reaches a queue shard, and what everybody may read of it.

Every transition is one Lua script (see `scripts`). It uses the clock of Redis, and may be repeated
with the same arguments if its reply was lost. The methods of all roles do that for a limited time,
and then raise BrokerUnavailable. keys.py describes the keys of a request.
"""

from __future__ import annotations

from collections.abc import Mapping

import redis.asyncio

from quire.keys import Keys
from quire.queue.publish import output_log
from quire.queue.publish.output_log import OutputRead
from quire.queue.reader_async import AsyncReader
from quire.queue.request.arguments import script_settings
from quire.queue.request.status import RequestStatus, kept, status
from quire.queue.shard_async import AsyncShard
from quire.queue.streams import at_most
from quire.queue.workers.absence import absence
from quire.queue.workers.workers import WorkerInfo, workers
from quire.transport.retrying_async import AsyncRetrying


class AsyncSide(AsyncShard):
    """One side of a queue shard, over one connection (see `connect_async`).

    For one event loop. The waiting reads of all coroutines share one connection and few XREADs,
    however many logs they follow. Set the same durations for all brokers of a queue.

    `lease_seconds`: how long a claim lasts without a heartbeat.
    `max_attempts`: after so many claims that publish nothing the request ends as failed.
    `max_queue_seconds`: the longest wait in the queue.
    `retention_seconds`: how long a finished request can be read. The last two together should be
    four leases or more, or a request may expire before it is taken over from a dead worker.
    `max_backlog`: the most requests that wait, scheduled or queued; with None only the limits of
    `set_limits` apply.
    `retry_seconds`: how long a call is retried.
    `durable`: SUBMIT, and the COMMIT of an end, return when they are on the server's disk. If the
    server cannot confirm that, DurabilityUnavailable is raised before anything is sent.
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
        sources: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            connection,
            Keys(queue, shard),
            settings=script_settings(
                lease_seconds=lease_seconds,
                max_queue_seconds=max_queue_seconds,
                retention_seconds=retention_seconds,
                max_attempts=max_attempts,
                max_backlog=max_backlog,
            ),
            lease_seconds=lease_seconds,
            retry_seconds=retry_seconds,
            durable=durable,
            sources=sources,
        )
        self._reader = AsyncReader(
            self.connection,
            self.keys,
            longest_block=self._longest_block,
            # With turns of its own: the reads of all streams must not wait behind submits.
            retrying=AsyncRetrying(retry_seconds, self.connection),
        )

    async def close(self) -> None:
        """Ends all reads that wait, with BrokerUnavailable. The connection stays open."""
        await self._reader.close()

    async def status(self, request_id: str) -> RequestStatus:
        """A snapshot of the request. UnknownRequest if it does not exist or has expired."""
        return await self.run(status(self.keys, request_id))

    async def kept(self, request_id: str) -> bytes | None:
        """What the producer keeps with the request; None without it, or without the request."""
        return await self.run(kept(self.keys, request_id))

    async def read_output(
        self, seen: Mapping[str, int], *, block_seconds: float | None = None
    ) -> dict[str, OutputRead]:
        """What the output logs have after `seen`: request id -> number of tokens already read.

        If there is nothing new, it waits up to `block_seconds` (at most MAX_BLOCK_SECONDS; None
        does not wait). A request without news, or that does not exist, is not in the result.
        """
        block = at_most(block_seconds, self._longest_block)
        if block is not None and seen:
            return await self._reader.read(seen, timeout=block)
        count = self._reader.max_entries
        return await self.run(output_log.read_output(self.keys, seen, count=count))

    async def workers(self) -> list[WorkerInfo]:
        """The workers that have signed the registry within a day, sorted by name."""
        return await self.run(workers(self.keys))

    async def absence(self) -> str | None:
        """Why no worker will take a request of this shard, as a clause; None if one may.

        No worker is alive, all drain, the workers serve another number of shards, or the shard is
        paused. Also None if this Redis user may not read the registry. One round trip.
        """
        return await self.run(absence(self.keys))
