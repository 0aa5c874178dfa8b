"""The broker: one method for each atomic transition of a request, and the reads around them.

Every transition is one Lua script in `scripts/`, takes its clock from Redis, and may be repeated
with the same arguments when its reply was lost; that is what the methods here do, for a bounded
time, before they raise BrokerUnavailable. What a request goes through, and which keys hold it, is
told in keys.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import redis

from quire.calls import (
    claim_call,
    commit_call,
    dead_letter_call,
    heartbeat_call,
    reap_call,
    release_call,
    submit_call,
)
from quire.connection import MAX_BLOCK_SECONDS, Retrying, socket_timeout_of
from quire.endings import ENDINGS
from quire.errors import BrokerUnavailable, QueueFull, QuireError, UnknownRequest
from quire.ingress import IngressReader
from quire.keys import Keys
from quire.output import Completion, ErrorInfo, FinishReason, State
from quire.output_log import OutputRead, read_logs
from quire.protocol import GenerationRequest, Priority
from quire.replies import (
    claim_answer,
    dead_letter_of,
    status_of,
    worker_of,
)
from quire.script_runner import Argument, Call, ScriptRunner, raise_if_error
from quire.transitions import (
    Claim,
    Claimed,
    CommitItem,
    CommitReply,
    CommitStatus,
    DeadLetter,
    HeartbeatReply,
    IngressEntry,
    NotClaimed,
    Reaped,
    RequestStatus,
    Submitted,
    WorkerInfo,
)
from quire.wire import pack

#: The most items of one Lua call: two to three milliseconds of the server's one thread.
MAX_ITEMS_PER_CALL = 256

#: The longest reason stored with a dead letter, in characters.
MAX_REASON_LENGTH = 500

#: A worker that was silent for this long is forgotten, with its consumers.
WORKER_MEMORY_SECONDS = 86_400.0

#: How often the holder of an idempotency key may change during one submit.
MAX_HOLDER_CHANGES = 3

_Item = TypeVar("_Item")


class Broker:
    """The transitions of one queue shard over one Redis connection (see `connection.connect`).

    Safe to share between threads, except that `read_ingress` and `recover_entries` belong to one
    thread. All brokers of a queue should be given the same durations.

    `lease_seconds`: how long a claim lives without a heartbeat or commit. `max_attempts`: claims
    until a request is given up. `max_queue_seconds`: the longest wait in the queue.
    `retention_seconds`: how long a finished request can be read. `max_backlog`: the most entries
    waiting in the ingress streams, None for no limit. `retry_seconds`: how long a call is repeated.
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
            raise QueueFull(str(failure), accepted=accepted) from failure.__cause__
        if failure:
            raise failure
        return submitted

    def cancel(self, request_id: str) -> State:
        """Asks for the end of a request; returns its state after that.

        A queued request is `cancelled` at once; a running one stays `running` until its worker sees
        the flag on its next commit or heartbeat; a terminal one stays as it is. UnknownRequest.
        """
        call = Call((*self.keys.of_request(request_id), self.keys.lease), (request_id,))
        state = self._scripts.run("cancel", call)
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

    def now_ms(self) -> int:
        """The broker's clock in unix milliseconds: the one deadlines are measured on."""
        seconds, microseconds = self._retrying(self._connection.time)
        return int(seconds) * 1000 + int(microseconds) // 1000

    # What a worker needs.

    def ensure_groups(self) -> None:
        """Creates the ingress streams and their consumer group where they are missing."""
        self._ingress.ensure_groups()

    def read_ingress(self, worker: str, *, count: int, block_seconds: float) -> list[IngressEntry]:
        """Up to `count` fresh deliveries for `worker`, most urgent first; see IngressReader.read.

        BrokerUnavailable is raised without a retry; what a lost reply has delivered is found by
        `recover_entries`.
        """
        block = min(block_seconds, self._longest_block)
        return self._ingress.read(worker, count=count, block_seconds=block)

    def recover_entries(
        self, worker: str, *, min_idle_seconds: float, count: int
    ) -> list[IngressEntry]:
        """Deliveries nobody claimed: all of `worker`'s own, and any left for `min_idle_seconds`.

        Call it at the start and now and then. Harmless for entries that someone is just claiming:
        the claim decides.
        """
        return self._ingress.recover(worker, min_idle_seconds=min_idle_seconds, count=count)

    def claim(
        self, entries: Sequence[IngressEntry], *, fingerprint: str | None = None
    ) -> list[Claimed | NotClaimed]:
        """Turns deliveries into claims, one answer per entry in the same order.

        Either the request is this worker's now, with its lease running, or the answer says why not.
        The entry is removed from the stream in both cases. `fingerprint` names the engine and is
        recorded at the first claim.
        """
        owners = [secrets.token_hex(16) for _ in entries]
        calls = [
            claim_call(self.keys, entry, owner=owner, fingerprint=fingerprint)
            for entry, owner in zip(entries, owners, strict=True)
        ]
        replies = self._scripts.run_many("claim", calls)
        return [
            claim_answer(entry.request_id, owner, raise_if_error(reply))
            for entry, owner, reply in zip(entries, owners, replies, strict=True)
        ]

    def commit(self, items: Sequence[CommitItem]) -> list[CommitReply]:
        """Publishes tokens and ends, one answer per item in the same order.

        All items of one call of up to 256 are applied at one moment; each is judged alone. At most
        one item per request. Renews the leases of what it accepts.
        """
        replies: list[CommitReply] = []
        for part in _parts(items):
            rows = self._scripts.run("commit", commit_call(self.keys, part))
            replies += [
                CommitReply(CommitStatus(status.decode()), int(published), bool(cancel))
                for status, published, cancel in rows
            ]
        return replies

    def heartbeat(self, claims: Sequence[Claim]) -> list[HeartbeatReply]:
        """Renews the leases still held, one answer per claim in the same order."""
        replies: list[HeartbeatReply] = []
        for part in _parts(claims):
            rows = self._scripts.run("heartbeat", heartbeat_call(self.keys, part))
            replies += [HeartbeatReply(bool(alive), bool(cancel)) for alive, cancel in rows]
        return replies

    def release(self, claims: Sequence[Claim]) -> list[bool]:
        """Gives claims back: the requests are queued again, their tokens kept, no attempt counted.

        False where the claim was not held any more. A request that a caller wants cancelled ends.
        """
        replies: list[bool] = []
        for part in _parts(claims):
            rows = self._scripts.run("release", release_call(self.keys, part))
            replies += [bool(row) for row in rows]
        return replies

    def reap(self, *, limit: int = MAX_ITEMS_PER_CALL) -> list[Reaped]:
        """Takes requests from workers whose lease expired; any worker may call it at any time.

        Each is queued again, its tokens kept, or ended when it was cancelled, is past its deadline
        or has spent its attempts (a dead letter then). At most `limit`, oldest lease first.
        """
        reaped: list[Reaped] = []
        now = self.now_ms()
        lease = self.keys.lease
        rows: Any = self._retrying(
            lambda: self._connection.zrangebyscore(lease, "-inf", now, start=0, num=limit)
        )
        # The script looks at each lease again: it may have been renewed since.
        for part in _parts([row.decode() for row in rows]):
            states = self._scripts.run("reap", reap_call(self.keys, part))
            reaped += [
                Reaped(request_id, State(state.decode()))
                for request_id, state in zip(part, states, strict=True)
                if state
            ]
        return reaped

    def dead_letter(self, claim: Claim, reason: str, *, error: ErrorInfo | None = None) -> bool:
        """Ends a claimed request that can never run and keeps its original bytes for a person.

        For bytes that cannot be read, or an unknown major version. The caller of the request gets a
        `failed` record with `error` (code `undecodable` by default). False when fenced.
        """
        reason = reason[:MAX_REASON_LENGTH]
        completion = Completion(
            request_id=claim.request_id,
            state=State.FAILED,
            finish_reason=FinishReason.REJECTED,
            error=error or ErrorInfo("undecodable", reason),
        )
        call = dead_letter_call(self.keys, claim, reason, done=completion.encode())
        return bool(self._scripts.run("dead_letter", call))

    # What an operator needs.

    def dead_letters(self, *, count: int = 100) -> list[DeadLetter]:
        """The newest dead letters, newest first."""
        key = self.keys.dead
        rows: Any = self._retrying(lambda: self._connection.xrevrange(key, count=count))
        return [dead_letter_of(entry_id, fields) for entry_id, fields in rows]

    def queue_depth(self) -> dict[Priority, int]:
        """Entries in each ingress stream: waiting, or delivered and not yet claimed."""

        def lengths() -> list[int]:
            with self._connection.pipeline(transaction=False) as pipeline:
                for stream in self.keys.all_ingress:
                    pipeline.xlen(stream)
                return pipeline.execute()

        return dict(zip(Priority, self._retrying(lengths), strict=True))

    def beat_worker(self, worker: str, state: str, load: Mapping[str, float]) -> None:
        """Notes that a worker lives; forgets those silent for a day, with their idle consumers."""
        call = Call(
            (self.keys.workers, *self.keys.all_ingress),
            (worker, state, pack(dict(load), field="load"), int(WORKER_MEMORY_SECONDS * 1000)),
        )
        self._scripts.run("beat_worker", call)

    def workers(self) -> list[WorkerInfo]:
        """The last word of every worker heard within a day, sorted by name."""
        key = self.keys.workers
        rows: Any = self._retrying(lambda: self._connection.hgetall(key))
        now = self.now_ms()
        found = [worker_of(name, value, now_ms=now) for name, value in rows.items()]
        return sorted(found, key=lambda info: info.name)

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
            raise QueueFull("the backlog limit of the queue is reached")
        if outcome == "held":
            raise BrokerUnavailable("the idempotency key changed hands too often")
        return Submitted(request_id, State(state), created=outcome == "created")


def _parts(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    for first in range(0, len(items), MAX_ITEMS_PER_CALL):
        yield items[first : first + MAX_ITEMS_PER_CALL]
