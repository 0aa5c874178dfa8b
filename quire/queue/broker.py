"""The broker: one method for each atomic transition of a request, and the reads around them.

Every transition is one Lua script (see `scripts`). It uses the clock of Redis, and may be repeated
with the same arguments if its reply was lost. The methods here do that for a limited time, and then
raise BrokerUnavailable. keys.py describes the keys of a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import redis

from quire.keys import Keys
from quire.queue.claim.claim import Claiming
from quire.queue.control.controlling import Controlling
from quire.queue.ends.telling import Telling
from quire.queue.groups.grouping import Grouping
from quire.queue.lease.lease import Leasing
from quire.queue.lease.moving import Moving
from quire.queue.publish import output_log
from quire.queue.publish.commit import Committing
from quire.queue.publish.output_log import OutputRead
from quire.queue.rank.policy import Announcing
from quire.queue.repair.dead_letters import Requeuing
from quire.queue.repair.restore import Restoring
from quire.queue.request.arguments import script_settings
from quire.queue.request.status import RequestStatus, kept, status
from quire.queue.streams import at_most
from quire.queue.submit.cancel import cancelling, discarding
from quire.queue.submit.submit import Submitted, submitting
from quire.queue.view.watching import Watching
from quire.queue.workers.beats import Beating
from quire.wire.message import Message
from quire.wire.output import State
from quire.wire.protocol import GenerationRequest


class Broker(
    Claiming, Committing, Leasing, Moving, Restoring, Announcing, Beating,
    Requeuing, Controlling, Watching, Grouping, Telling,
):  # fmt: skip
    """The transitions of one queue shard over one Redis connection (see `connection.connect`).

    Safe to share between threads. Set the same durations for all brokers of a queue.


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
        connection: redis.Redis,
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

    # What a producer needs.

    def submit(self, request: GenerationRequest) -> Submitted:
        """Enqueues a request once, however often it is called with the same id.

        InvalidRequest if it cannot be encoded; the body is not checked here. QueueFull if a limit
        of the backlog or Redis' memory limit is reached; then nothing was enqueued.
        """
        return self.submit_many([request])[0]

    def submit_many(self, requests: Sequence[GenerationRequest]) -> list[Submitted]:
        """Enqueues many requests in few round trips.

        QueueFull if one was refused; its `accepted` are the ids of those that were enqueued.
        Calling again with the same requests is safe.
        """
        return self.submit_messages([Message.of(request) for request in requests])

    def submit_messages(self, messages: Sequence[Message]) -> list[Submitted]:
        """Like `submit_many`, for requests that are already encoded."""
        return self.run(submitting(self.keys, messages))

    def cancel(self, request_id: str) -> State:
        """Cancels a request; returns its state after that.

        A waiting request is `cancelled` at once. A running one stays `running` until its worker
        sees the flag at its next commit or heartbeat. A terminal one does not change.
        UnknownRequest.
        """
        return self.run(cancelling(self.keys, request_id))

    def discard(self, request_id: str) -> State:
        """Deletes what was kept with a request, and after its end the record and the output too.

        Returns the state before. Nothing else of an open request changes: cancel it first, and call
        this again after its end. Not for requests of groups: InvalidRequest. UnknownRequest.
        """
        return self.run(discarding(self.keys, request_id))

    def kept(self, request_id: str) -> bytes | None:
        """What the producer keeps with the request; None without it, or without the request."""
        return self.run(kept(self.keys, request_id))

    def status(self, request_id: str) -> RequestStatus:
        """A snapshot of the request. UnknownRequest if it does not exist or has expired."""
        return self.run(status(self.keys, request_id))

    def read_output(
        self, seen: Mapping[str, int], *, block_seconds: float | None = None
    ) -> dict[str, OutputRead]:
        """What the output logs have after `seen`: request id -> number of tokens already read.

        If there is nothing new, it waits up to `block_seconds` (at most MAX_BLOCK_SECONDS; None
        does not wait). A request without news, or that does not exist, is not in the result.
        """
        block, count = at_most(block_seconds, self._longest_block), output_log.MAX_ENTRIES_PER_READ
        return self.run(output_log.read_output(self.keys, seen, count=count, block_seconds=block))

    def close(self) -> None:
        """Does nothing: beside its calls it has nothing to end. The connection stays open."""
