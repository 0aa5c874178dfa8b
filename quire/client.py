"""The synchronous client: submit requests, follow their output, wait for their end, cancel them.

    with Client("redis://127.0.0.1:6379/0") as quire:
        handle = quire.submit(prompt="12+34=", sampling={"max_tokens": 16}, deadline=60)
        for chunk in handle.stream():
            print(chunk.text, end="")

The id of a request is minted before the first attempt to submit it, so every retry is harmless, and
a reader that comes back later says how many tokens it has and misses none. Readers only read: a
slow one, or a thousand, change nothing for the worker.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Unpack

import redis

from quire.arguments import RequestArguments, RequestOptions, build_request, needs_clock
from quire.broker import Broker
from quire.connection import MAX_BLOCK_SECONDS, connect
from quire.errors import (
    Cancelled,
    DeadlineExceeded,
    OutputRewound,
    ProtocolError,
    RequestFailed,
    ResultExpired,
    UnknownRequest,
    WaitTimeout,
)
from quire.output import Completion, State, TokenChunk
from quire.protocol import GenerationRequest
from quire.transitions import RequestStatus

#: Where a Redis usually listens.
DEFAULT_URL = "redis://127.0.0.1:6379/0"


class Client:
    """Talks to one queue. Safe to share between threads.

    `broker` is a Redis URL, a connection made with `quire.connection.connect`, or a Broker with
    settings of its own. Nothing is sent before the first call. Only a connection made here is
    closed here. All methods may raise BrokerUnavailable.
    """

    def __init__(
        self,
        broker: str | redis.Redis | Broker = DEFAULT_URL,
        *,
        queue: str = "default",
        tenant: str = "default",
        max_backlog: int | None = None,
    ) -> None:
        self._owned = connect(broker) if isinstance(broker, str) else None
        connection = self._owned or broker
        if isinstance(connection, redis.Redis):
            connection = Broker(connection, queue=queue, max_backlog=max_backlog)
        assert isinstance(connection, Broker)
        self._broker = connection
        self._tenant = tenant

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections this client made; harmless when repeated."""
        if self._owned is not None:
            self._owned.close()

    def submit(
        self, prompt: str | Sequence[int] | None = None, **options: Unpack[RequestOptions]
    ) -> Handle:
        """Enqueues one request: a text, token ids, or the `messages` of a conversation.

        `sampling` is a SamplingParams or a map of its fields, `priority` a name or a Priority,
        `deadline` in seconds from now. With `delay_seconds` or a moment `not_before` it is
        scheduled, and queued then. `request_id` makes a call repeatable across processes. With
        an `idempotency_key` the tenant has used before, the handle is that of the earlier request.
        InvalidRequest, QueueFull.
        """
        return self.submit_many([{"prompt": prompt, **options}])[0]

    def submit_many(self, requests: Iterable[GenerationRequest | RequestArguments]) -> list[Handle]:
        """Enqueues many requests in few round trips; a map holds the arguments of one `submit`.

        InvalidRequest before anything is sent. QueueFull when some were refused; its `accepted` are
        the ids of the others, which are in the queue.
        """
        now_ms: int | None = None
        ready: list[GenerationRequest] = []
        for item in requests:
            if isinstance(item, GenerationRequest):
                item.parse_body()
                ready.append(item)
                continue
            if now_ms is None and needs_clock(item):
                # Such moments are measured on the broker's clock; one look serves them all.
                now_ms = self._broker.now_ms()
            ready.append(build_request(item, tenant=self._tenant, now_ms=now_ms))
        submitted = self._broker.submit_many(ready)
        return [Handle(self._broker, answer.request_id, known=True) for answer in submitted]

    def attach(self, request_id: str) -> Handle:
        """A handle to a request submitted elsewhere or earlier. Nothing is sent yet."""
        return Handle(self._broker, request_id)

    def stream(self, request_id: str, *, after: int = 0) -> Iterator[TokenChunk]:
        """See Handle.stream."""
        return self.attach(request_id).stream(after=after)

    def result(self, request_id: str, *, timeout: float | None = None) -> Completion:
        """See Handle.result."""
        return self.attach(request_id).result(timeout=timeout)

    def cancel(self, request_id: str) -> State:
        """See Handle.cancel."""
        return self._broker.cancel(request_id)

    def status(self, request_id: str) -> RequestStatus:
        """A snapshot of the request. UnknownRequest."""
        return self._broker.status(request_id)


class Handle:
    """One request as its caller sees it. It holds no state but the id and may be thrown away."""

    def __init__(self, broker: Broker, request_id: str, *, known: bool = False) -> None:
        self.request_id = request_id
        self._broker = broker
        self._known = known

    def __repr__(self) -> str:
        return f"Handle({self.request_id!r})"

    def stream(self, *, after: int = 0) -> Iterator[TokenChunk]:
        """Yields what is published after the first `after` tokens, until the request ends.

        Ends silently when the request completed. Otherwise raises Cancelled, DeadlineExceeded or
        RequestFailed after the last chunk; UnknownRequest or ResultExpired when the request is
        gone; OutputRewound when Redis lost tokens this reader had. `after` should be the `end` of a
        chunk.
        """
        for item in _follow(self._broker, self.request_id, after=after, known=self._known):
            if isinstance(item, Completion):
                raise_unless_completed(item)
                return
            self._known = True
            yield item

    def result(self, *, timeout: float | None = None) -> Completion:
        """Waits for the end and returns the completion with all text and tokens joined.

        WaitTimeout after `timeout` seconds; the request goes on. For a request that did not
        complete the same errors as `stream`, carrying the completion.
        """
        give_up = None if timeout is None else time.monotonic() + timeout
        chunks: list[TokenChunk] = []
        for item in _follow(
            self._broker, self.request_id, after=0, known=self._known, give_up=give_up
        ):
            if isinstance(item, Completion):
                completion = replace(
                    item,
                    text="".join(chunk.text for chunk in chunks),
                    token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
                )
                raise_unless_completed(completion)
                return completion
            self._known = True
            chunks.append(item)
        raise AssertionError("an output is followed to its end")

    def cancel(self) -> State:
        """Asks for the end of the request; returns its state after that. UnknownRequest."""
        return self._broker.cancel(self.request_id)

    def status(self) -> RequestStatus:
        """A snapshot of the request. UnknownRequest."""
        return self._broker.status(self.request_id)


def raise_unless_completed(completion: Completion) -> None:
    """Raises what became of the request, unless it completed."""
    if completion.state is State.COMPLETED:
        return
    kinds = {State.CANCELLED: Cancelled, State.EXPIRED: DeadlineExceeded}
    kind = kinds.get(completion.state, RequestFailed)
    if completion.error is None:
        raise kind(str(completion.state), "the request did not complete", completion=completion)
    error = completion.error
    raise kind(error.code, error.message, error.field, completion=completion)


def _follow(
    broker: Broker, request_id: str, *, after: int, known: bool, give_up: float | None = None
) -> Iterator[TokenChunk | Completion]:
    """The chunks after the first `after` tokens as they come, and the completion, last.

    `give_up` is a reading of the monotonic clock; `known` whether the request was heard of before.
    """
    seen, ends_without_entry, block = after, 0, None
    while True:
        read = broker.read_output({request_id: seen}, block_seconds=block).get(request_id)
        if read is not None:
            for chunk in read.chunks:
                if chunk.start != seen:
                    raise ProtocolError(f"{request_id}: the log has a gap at token {seen}")
                yield chunk
                seen = chunk.end
            if read.completion is not None:
                yield read.completion
                return
        else:
            status = _record(broker, request_id, known=known)
            known = True
            if status.published < seen:
                raise OutputRewound(request_id, seen=seen, published=status.published)
            # The end may have come since the read, but it cannot be missing twice.
            ends_without_entry += status.state.is_terminal
            if ends_without_entry > 1:
                raise ResultExpired(request_id)
        block = MAX_BLOCK_SECONDS
        if give_up is not None:
            block = min(block, give_up - time.monotonic())
            if block <= 0:
                raise WaitTimeout(f"{request_id} has not ended yet")


def _record(broker: Broker, request_id: str, *, known: bool) -> RequestStatus:
    try:
        return broker.status(request_id)
    except UnknownRequest:
        if known:
            raise ResultExpired(request_id) from None
        raise
