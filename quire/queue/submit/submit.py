"""SUBMIT: puts requests into a shard, each once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import BrokerUnavailable, QueueFull, QuireError
from quire.keys import Keys
from quire.queue.submit.pictures import storing
from quire.transport.procedure import Procedure
from quire.transport.script_calls import Ask, ScriptCall, raise_if_error
from quire.wire.codec import pack
from quire.wire.message import Message
from quire.wire.output import State
from quire.wire.pictures import digests_of
from quire.wire.sizes import (
    estimated_tokens,
    is_open_ended,
    most_tokens_of_answer,
    rate_tokens_of,
)

#: How often one request is submitted again within a submit, because the holder of its idempotency
#: key has changed, or because its pictures were not stored.
MAX_AGAIN = 4

#: What each limit of SUBMIT is about.
_LIMITS = {
    "requests": "the backlog limit of the queue is reached: too many requests wait",
    "tokens": "the backlog limit of the queue is reached: too many tokens wait",
    "tenant": "the tenant {tenant} has as many open requests in the queue as it may",
    "rate": "the tenant {tenant} has used its tokens per minute; try again in {seconds:.1f} s",
}


@dataclass(frozen=True, slots=True)
class Submitted:
    """The answer to a submit.

    `request_id` is that of an earlier request when the idempotency key was known; `created` says
    whether this very call enqueued it: False for a repeated call, even if its first try did.
    `asked` is what the request already stored under the id asks, empty if that is not known.
    """

    request_id: str
    state: State
    created: bool
    asked: bytes = b""


def submitting(
    keys: Keys, messages: Sequence[Message], calls: Sequence[ScriptCall]
) -> Procedure[list[Submitted]]:
    """See `Producer.submit_many`. `calls` are those of `submit_call` for the messages."""
    submitted: list[Submitted] = []
    failure: QuireError | None = None
    for part in _parts_in_order(messages):
        replies = yield Ask("submit", calls[part], must_be_durable=True)
        for message, reply in zip(messages[part], replies, strict=True):
            try:
                answer = yield from _submitted(keys, message, reply)
            except QuireError as error:
                failure = failure or error
            else:
                submitted.append(answer)
    if isinstance(failure, QueueFull):
        raise failure.with_submitted(submitted) from failure.__cause__
    if failure:
        raise failure
    return submitted


def submit_call(keys: Keys, message: Message, *, holder: str | None = None) -> ScriptCall:
    """For submit.lua. `holder` is the id found under the idempotency key, to be looked at too."""
    request = message.request
    names = [*keys.of_producers, *keys.of_scripts(request.id)]
    if request.idempotency_key is not None:
        names.append(keys.idempotency(request.tenant, request.idempotency_key))
        names += [keys.request(holder)] if holder else []
    pictures = digests_of(request.body.get("messages"))
    names += map(keys.picture, pictures)
    metadata = pack(request.metadata, field="metadata") if request.metadata else b""
    return ScriptCall(
        names,
        (
            request.id,
            int(request.priority),
            request.tenant,
            request.deadline_ms or 0,
            metadata,
            message.data,
            holder or "",
            request.not_before_ms or 0,
            estimated_tokens(request),
            message.digest,
            most_tokens_of_answer(request),
            request.session_id or "",
            request.target_latency_ms or 0,
            message.kept,
            (request.answer_limit or 0) if is_open_ended(request) else "",
            len(pictures),
            rate_tokens_of(message.pictures.values()),
        ),
    )


def full_queue(*, limit: str, tenant: str, wait_ms: bytes | int = b"") -> QueueFull:
    """The refusal of submit.lua. `wait_ms`: when it may be let in at the rate of its tenant."""
    seconds = int(wait_ms) / 1000 if wait_ms else None
    message = _LIMITS[limit].format(tenant=tenant, seconds=seconds or 0.0)
    return QueueFull(message, limit=limit, retry_after_seconds=seconds)


def _parts_in_order(messages: Sequence[Message]) -> Iterator[slice]:
    """The messages in parts: a part ends with a turn of a session that has pictures.

    If they are not stored yet, the turn is submitted twice, and the next one must not come first.
    """
    begin = 0
    for index, message in enumerate(messages, start=1):
        is_turn = message.request.session_id is not None and bool(message.pictures)
        if is_turn or index == len(messages):
            yield slice(begin, index)
            begin = index


def _submitted(keys: Keys, message: Message, reply: Any) -> Procedure[Submitted]:
    outcome, request_id, state, asked = _parts(reply)
    holder: str | None = None
    for _ in range(MAX_AGAIN):
        if outcome == "held":
            # A script must declare its keys, so reading the record of the holder needs another
            # call.
            holder = request_id
        elif outcome == "lacks":
            digests = digests_of(message.request.body.get("messages"))
            lacking = [digests[int(number) - 1] for number in state.split()]
            yield from storing(keys, message, lacking)
        else:
            break
        (reply,) = yield Ask(
            "submit", [submit_call(keys, message, holder=holder)], must_be_durable=True
        )
        outcome, request_id, state, asked = _parts(reply)
    if outcome == "full":
        raise full_queue(limit=state, tenant=message.request.tenant, wait_ms=asked)
    if outcome == "held":
        raise BrokerUnavailable("the request of the idempotency key changed too often")
    if outcome == "lacks":
        raise BrokerUnavailable("the pictures of the request expired at once")
    return Submitted(request_id, State(state), created=outcome == "created", asked=asked)


def _parts(reply: Any) -> tuple[str, str, str, bytes]:
    """The reply of submit.lua: outcome, id, state, and digest or wait; the last may be missing."""
    outcome, request_id, state, *others = raise_if_error(reply)
    last = others[0] if others else b""
    return outcome.decode(), request_id.decode(), state.decode(), last
