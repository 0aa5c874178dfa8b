"""The broker: one method for each atomic transition of a request, and the reads around them.

Every transition is one Lua script in `scripts/`, takes its clock from Redis, and may be repeated
with the same arguments when its reply was lost; that is what the methods here do, for a bounded
time, before they raise BrokerUnavailable. What a request goes through, and which keys hold it, is
told in keys.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis

from quire.calls import cancel_call, submit_call
from quire.connection import MAX_BLOCK_SECONDS, Retrying, socket_timeout_of
from quire.endings import ENDINGS
from quire.errors import BrokerUnavailable, QueueFull, QuireError, UnknownRequest
from quire.ingress import IngressReader
from quire.keys import Keys
from quire.operating import Operating
from quire.output import State
from quire.output_log import OutputRead, read_logs
from quire.protocol import GenerationRequest
from quire.replies import full_queue, status_of
from quire.script_runner import Argument, ScriptRunner, raise_if_error
from quire.transitions import RequestStatus, Submitted
from quire.working import Working

#: How often the holder of an idempotency key may change during one submit.
MAX_HOLDER_CHANGES = 3


class Broker(Working, Operating):
    """The transitions of one queue shard over one Redis connection (see `connection.connect`).

    Safe to share between threads, except that `read_ingress` and `recover_entries` belong to one
    thread. All brokers of a queue should be given the same durations.

    `lease_seconds`: how long a claim lives without a heartbeat or commit. `max_attempts`: claims
    until a request is given up. `max_queue_seconds`: the longest wait in the queue.
    `retention_seconds`: how long a finished request can be read. `max_backlog`: the most requests
    waiting, counted by their entries in the ingress streams and the delay set, None for no limit
    but those set by `set_limits`. `retry_seconds`: how long a call is repeated.
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
        sources: Mapping[str, str] | None = None,
    ) -> None:
        timeout = socket_timeout_of(connection)
        if timeout is not None and timeout <= 0:
            raise ValueError("the connection's socket timeout must be positive")
        if min(lease_seconds, max_queue_seconds, retention_seconds) <= 0 or max_attempts < 1:
            raise ValueError("durations must be positive and at least one attempt allowed")
        # A read that outlives its socket would be sent again and again, and deliver each time.
        self._longest_block = min(MAX_BLOCK_SECONDS, timeout / 2 if timeout else MAX_BLOCK_SECONDS)
        self.keys = Keys(queue, shard)
        self.lease_seconds = lease_seconds
        self._connection = connection
        self._retrying = Retrying(retry_seconds)
        self._ingress = IngressReader(connection, self.keys, retrying=self._retrying)
        settings: tuple[Argument, ...] = (
            *(int(s * 1000) for s in (lease_seconds, max_queue_seconds, retention_seconds)),
            max_attempts,
            max_backlog if max_backlog is not None else 0,
            *ENDINGS,
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
        submitted: list[Submitted] = []
        failure: QuireError | None = None
        calls = [submit_call(self.keys, request) for request in requests]
        replies = self._scripts.run_many("submit", calls)
        for request, reply in zip(requests, replies, strict=True):
            try:
                submitted.append(self._submitted(request, reply))
            except QuireError as error:
                failure = failure or error
        if isinstance(failure, QueueFull):
            accepted = tuple(answer.request_id for answer in submitted)
            raise QueueFull(
                str(failure), limit=failure.limit, accepted=accepted
            ) from failure.__cause__
        if failure:
            raise failure
        return submitted

    def cancel(self, request_id: str) -> State:
        """Asks for the end of a request; returns its state after that.

        One that waits is `cancelled` at once; a running one stays `running` until its worker sees
        the flag on its next commit or heartbeat; a terminal one stays as it is. UnknownRequest.
        """
        state = self._scripts.run("cancel", cancel_call(self.keys, request_id))
        if not state:
            raise UnknownRequest(request_id)
        return State(state.decode())

    def status(self, request_id: str) -> RequestStatus:
        """A snapshot of the request. UnknownRequest when there is none or it is forgotten."""
        key = self.keys.request(request_id)
        fields: Any = self._retrying(lambda: self._connection.hgetall(key))
        if not fields:
            raise UnknownRequest(request_id)
        return status_of(request_id, fields)

    def read_output(
        self, seen: Mapping[str, int], *, block_seconds: float | None = None
    ) -> dict[str, OutputRead]:
        """What the output logs hold beyond the tokens already seen: request id -> number of tokens.

        Without news waits up to `block_seconds` (at most MAX_BLOCK_SECONDS; None does not wait). A
        request without news is missing from the answer, and so is one that does not exist.
        """
        block = None if block_seconds is None else min(block_seconds, self._longest_block)
        return self._retrying(
            lambda: read_logs(self._connection, self.keys, seen, block_seconds=block)
        )

    def _submitted(self, request: GenerationRequest, reply: Any) -> Submitted:
        outcome, request_id, state = (part.decode() for part in raise_if_error(reply))
        for _ in range(MAX_HOLDER_CHANGES):
            if outcome != "held":
                break
            # A script declares its keys, so the record of the holder takes a call of its own.
            call = submit_call(self.keys, request, holder=request_id)
            reply = self._scripts.run("submit", call)
            outcome, request_id, state = (part.decode() for part in reply)
        if outcome == "full":
            raise full_queue(limit=state)
        if outcome == "held":
            raise BrokerUnavailable("the idempotency key changed hands too often")
        return Submitted(request_id, State(state), created=outcome == "created")
