"""The broker: one method for each atomic transition of a request, and the reads around them.

Every transition is one Lua script in `scripts/`, takes its clock from Redis, and may be repeated
with the same arguments when its reply was lost; that is what the methods here do, for a bounded
time, before they raise BrokerUnavailable. keys.py describes the keys that hold a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import redis

from quire.broker.grouping import MAX_LEASES, Grouping, ended_of, overdue_in
from quire.broker.ingress import IngressReader
from quire.broker.moving import Moving
from quire.broker.operating import Operating
from quire.broker.producing import Conversation, cancelling, script_settings, submitting
from quire.broker.working import Working
from quire.errors import UnknownRequest
from quire.keys import Keys
from quire.transitions.calls import MAX_ITEMS_PER_CALL, expire_call
from quire.transitions.commits import CommitCalls
from quire.transitions.output_log import OutputRead, read_logs
from quire.transitions.replies import status_of
from quire.transitions.values import RequestStatus, Submitted
from quire.transport.connection import Retrying, longest_block_of
from quire.transport.durability import Durability
from quire.transport.patience import OUTAGE_RETRIES
from quire.transport.script_runner import ScriptRunner
from quire.wire.message import Message
from quire.wire.output import State
from quire.wire.protocol import GenerationRequest

_Result = TypeVar("_Result")


class Broker(Working, Moving, Operating, Grouping):
    """The transitions of one queue shard over one Redis connection (see `connection.connect`).

    Safe to share between threads, except that `read_ingress` and `recover_entries` belong to one
    thread. All brokers of a queue should be given the same durations.

    `lease_seconds`: how long a claim lives without a heartbeat. `max_attempts`: claims
    that publish nothing until a request is given up. `max_queue_seconds`: the longest wait in the
    queue. `retention_seconds`: how long a finished request can be read. Together these two should
    be four leases or more, or what a worker leaves that dies may be gone. `max_backlog`: the most
    requests waiting, scheduled or queued, None for no limit but those set by `set_limits`.
    `retry_seconds`: how long a call is repeated.
    `durable`: SUBMIT, and the COMMIT of an end, return when they are on the server's disk; where
    the server cannot promise that, DurabilityUnavailable is raised before anything is sent.
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
        self._longest_block = longest_block_of(connection)
        self.keys = Keys(queue, shard)
        self.lease_seconds = lease_seconds
        self._connection = connection
        self._retrying = Retrying(retry_seconds, connection)
        #: For how long a wait without a timeout bears that Redis does not answer.
        self.outage_seconds = OUTAGE_RETRIES * retry_seconds
        self._durability = (
            Durability(connection, self.keys, longest_seconds=self._longest_block)
            if durable
            else None
        )
        self._commit_calls = CommitCalls(self.keys)
        self._ingress = IngressReader(connection, self.keys, retrying=self._retrying)
        settings = script_settings(
            lease_seconds=lease_seconds,
            max_queue_seconds=max_queue_seconds,
            retention_seconds=retention_seconds,
            max_attempts=max_attempts,
            max_backlog=max_backlog,
        )
        self._scripts = ScriptRunner(connection, settings, retrying=self._retrying, sources=sources)

    # What a producer needs.

    def submit(self, request: GenerationRequest) -> Submitted:
        """Enqueues a request once, however often it is called with the same id.

        InvalidRequest when it cannot be encoded; its body is not checked here. QueueFull when the
        backlog limit or Redis' memory is reached; nothing was enqueued then.
        """
        return self.submit_many([request])[0]

    def submit_many(self, requests: Sequence[GenerationRequest]) -> list[Submitted]:
        """Enqueues many requests in few round trips.

        QueueFull when one was refused; its `accepted` are the ids that are in the queue all the
        same. Calling again with the same requests is safe.
        """
        return self.submit_messages([Message.of(request) for request in requests])

    def submit_messages(self, messages: Sequence[Message]) -> list[Submitted]:
        """Like `submit_many`, of requests that are encoded already."""
        return self._hold(submitting(self.keys, messages))

    def cancel(self, request_id: str) -> State:
        """Cancels a request; returns its state after that.

        A waiting one is `cancelled` at once; a running one stays `running` until its worker sees
        the flag on its next commit or heartbeat; a terminal one stays as it is. UnknownRequest.
        """
        return self._hold(cancelling(self.keys, request_id))

    def end_overdue(self, request_ids: Sequence[str]) -> dict[str, State]:
        """Ends those whose time is over and which no worker holds; returns the states of these.

        Their time is over when they are past their deadline, too long in the queue or, left behind
        by a worker that is gone, cancelled. Whoever waits for them may call it at any time.
        """
        calls = [expire_call(self.keys, [request_id]) for request_id in request_ids]
        return ended_of(request_ids, self._scripts.run_many("expire", calls))

    def overdue(self, group: str) -> list[str]:
        """What a reader of a group should `end_overdue`.

        Members that a worker has left behind, and whatever has waited too long: that ends at once,
        so it is in nobody's way the next time.
        """
        now = self.now_ms()

        def look() -> list[Any]:
            with self._connection.pipeline(transaction=False) as pipeline:
                for times, most in (
                    (self.keys.wait, MAX_ITEMS_PER_CALL),
                    (self.keys.lease, MAX_LEASES),
                ):
                    pipeline.zrangebyscore(times, "-inf", now, start=0, num=most)
                return pipeline.execute()

        return overdue_in(self._retrying(look), group)

    def status(self, request_id: str) -> RequestStatus:
        """A snapshot of the request. UnknownRequest when there is none, or it has expired."""
        place, fields, time = self._retrying(partial(self._look, request_id))
        if not fields:
            raise UnknownRequest(request_id)
        return status_of(request_id, fields, place=place, time=time)

    def read_output(
        self, seen: Mapping[str, int], *, block_seconds: float | None = None
    ) -> dict[str, OutputRead]:
        """What the output logs hold beyond `seen`: request id -> number of tokens already read.

        If there is nothing new it waits up to `block_seconds` (at most MAX_BLOCK_SECONDS; None does
        not wait). A request without news, or that does not exist, is missing from the result.
        """
        block = None if block_seconds is None else min(block_seconds, self._longest_block)
        return self._retrying(
            lambda: read_logs(self._connection, self.keys, seen, block_seconds=block),
            wait_seconds=block or 0.0,
        )

    def _look(self, request_id: str) -> list[Any]:
        with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.hget(self.keys.log_positions, request_id)
            pipeline.hgetall(self.keys.request(request_id))
            pipeline.time()
            return pipeline.execute()

    def _hold(self, conversation: Conversation[_Result]) -> _Result:
        replies: Any = None
        try:
            while True:
                # The first send of a generator must be None.
                ask = conversation.send(replies)
                # A lost cancellation can be repeated; a submit must not be lost.
                durability = self._durability if ask.transition == "submit" else None
                replies = self._scripts.run_many(ask.transition, ask.calls, durability=durability)
        except StopIteration as end:
            result: _Result = end.value
            return result
