"""The transitions of a producer, for Broker and AsyncBroker. Knows no connection.

A transition that takes several calls is a procedure (see procedure.py): it is written once, and the
owner of a connection runs it in a thread or in an event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import BrokerUnavailable, InvalidRequest, QueueFull, QuireError, UnknownRequest
from quire.keys import GROUP_SEPARATOR, Keys
from quire.queue.calls import cancel_call, discard_call, submit_call
from quire.queue.endings import ENDINGS
from quire.queue.replies import full_queue
from quire.queue.routing import placed
from quire.queue.values import Submitted
from quire.tracing import NO_HEADERS, TRACE_HEADER
from quire.transport.procedure import Procedure
from quire.transport.script_runner import Argument, ScriptCall, raise_if_error
from quire.wire.arguments import (
    MAX_SECONDS,
    MIN_KEPT_SECONDS,
    RequestArguments,
    build_request,
    needs_clock,
)
from quire.wire.codec import pack
from quire.wire.message import Message
from quire.wire.output import State
from quire.wire.protocol import MAX_HEADERS_BYTES, GenerationRequest
from quire.wire.sampling import ParsedBody

#: What can be submitted. A message is checked and encoded already.
Item = Message | GenerationRequest | RequestArguments

#: The transitions after which a producer relies on what it has sent.
_DURABLE = frozenset({"submit", "batches/publish_file", "batches/create_batch"})

#: How often the holder of an idempotency key may change during one submit.
MAX_HOLDER_CHANGES = 3


@dataclass(frozen=True, slots=True)
class Ask:
    """The step that calls one transition. Its replies are those of `ScriptRunner.run_many`."""

    transition: str
    calls: Sequence[ScriptCall]

    @property
    def must_be_durable(self) -> bool:
        """Whether a durable broker waits for the disk. Not for a cancel, which may be repeated."""
        return self.transition in _DURABLE


def submitting(
    keys: Keys, messages: Sequence[Message], *, calls: Sequence[ScriptCall] | None = None
) -> Procedure[list[Submitted]]:
    """See `Broker.submit_many`. `calls` are those for the messages, if the caller has made them."""
    submitted: list[Submitted] = []
    failure: QuireError | None = None
    if calls is None:
        calls = [submit_call(keys, message) for message in messages]
    replies = yield Ask("submit", calls)
    for message, reply in zip(messages, replies, strict=True):
        try:
            answer = yield from _submitted(keys, message, reply)
        except QuireError as error:
            failure = failure or error
        else:
            submitted.append(answer)
    if isinstance(failure, QueueFull):
        accepted = tuple(answer.request_id for answer in submitted)
        raise failure.with_accepted(accepted) from failure.__cause__
    if failure:
        raise failure
    return submitted


def cancelling(keys: Keys, request_id: str) -> Procedure[State]:
    """See `Broker.cancel`."""
    (reply,) = yield Ask("cancel", [cancel_call(keys, request_id)])
    state = raise_if_error(reply)
    if not state:
        raise UnknownRequest(request_id)
    return State(state.decode())


def discarding(keys: Keys, request_id: str) -> Procedure[State]:
    """See `Broker.discard`."""
    if GROUP_SEPARATOR in request_id:
        raise InvalidRequest("request_id", "must not be in a group, which has counts of its own")
    (reply,) = yield Ask("discard", [discard_call(keys, request_id)])
    state = raise_if_error(reply)
    if not state:
        raise UnknownRequest(request_id)
    return State(state.decode())


def script_settings(
    *,
    lease_seconds: float,
    max_queue_seconds: float,
    retention_seconds: float,
    max_attempts: int,
    max_backlog: int | None,
) -> tuple[Argument, ...]:
    """The first arguments of every transition, as `common.lua` reads them. ValueError."""
    durations = (lease_seconds, max_queue_seconds, retention_seconds)
    if not all(MIN_KEPT_SECONDS <= one <= MAX_SECONDS for one in durations) or max_attempts < 1:
        names = "lease_seconds, max_queue_seconds and retention_seconds"
        limits = f"{MIN_KEPT_SECONDS} to {MAX_SECONDS}, and max_attempts at least 1"
        raise ValueError(f"{names} must be {limits}")
    return (
        *(int(seconds * 1000) for seconds in durations),
        max_attempts,
        max_backlog if max_backlog is not None else 0,
        *ENDINGS,
    )


def must_ask_clock(items: Iterable[Item]) -> bool:
    """Whether one of them has a time relative to the broker's clock."""
    ready = (GenerationRequest, Message)
    return any(not isinstance(item, ready) and needs_clock(item) for item in items)


def ready_messages(
    items: Iterable[Item],
    *,
    tenant: str,
    now_ms: int | None,
    num_shards: int,
    group: str | None,
    headers: Mapping[str, str] = NO_HEADERS,
) -> Iterator[Message]:
    """The checked messages of a submit, with the ids under which the requests are stored.

    A message that stays as it is is not encoded again. `headers` are added to each request that has
    no trace of its own. Lazy: each request is checked when the iterator reaches it. InvalidRequest,
    with the `index` of the wrong item if there are several.
    """
    given = list(items)
    for index, item in enumerate(given):
        try:
            before, body = _ready(item, tenant=tenant, now_ms=now_ms)
            request = placed(_traced(before, headers), num_shards=num_shards, group=group)
            if isinstance(item, Message) and request is before:
                message = item
            else:
                # Encode it here, too: later, other shards would have got their part before an
                # error.
                message = Message.of(request, body)
        except InvalidRequest as error:
            if len(given) == 1:
                raise
            raise InvalidRequest(error.field, error.message, index=index) from error
        yield message


def _ready(item: Item, *, tenant: str, now_ms: int | None) -> tuple[GenerationRequest, ParsedBody]:
    if isinstance(item, Message):
        return item.request, item.body or item.request.parse_body()
    if isinstance(item, GenerationRequest):
        return item, item.parse_body()
    return build_request(item, tenant=tenant, now_ms=now_ms)


def _traced(request: GenerationRequest, headers: Mapping[str, str]) -> GenerationRequest:
    """The request with the headers of its submit, unless it has a trace of its own, or no room."""
    if not headers or TRACE_HEADER in request.headers:
        return request
    both = {**request.headers, **headers}
    if len(pack(both)) > MAX_HEADERS_BYTES:
        return request
    return request.model_copy(update={"headers": both})


def _submitted(keys: Keys, message: Message, reply: Any) -> Procedure[Submitted]:
    outcome, request_id, state, asked = _parts(reply)
    for _ in range(MAX_HOLDER_CHANGES):
        if outcome != "held":
            break
        # A script must declare its keys, so reading the record of the holder needs another call.
        (reply,) = yield Ask("submit", [submit_call(keys, message, holder=request_id)])
        outcome, request_id, state, asked = _parts(reply)
    if outcome == "full":
        raise full_queue(limit=state, tenant=message.request.tenant, wait_ms=asked)
    if outcome == "held":
        raise BrokerUnavailable("the request of the idempotency key changed too often")
    return Submitted(request_id, State(state), created=outcome == "created", asked=asked)


def _parts(reply: Any) -> tuple[str, str, str, bytes]:
    """The reply of submit.lua: outcome, id, state, and digest or wait; the last may be missing."""
    outcome, request_id, state, *others = raise_if_error(reply)
    last = others[0] if others else b""
    return outcome.decode(), request_id.decode(), state.decode(), last
