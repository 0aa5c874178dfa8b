"""Determines a claimed request's Origin, and whether its output can be continued here.

Knows no queue and no thread. All results follow from the claim, the request and the model.
"""

from dataclasses import replace

from engine.request import Priority
from quire.errors import InvalidRequest
from quire.queue.claim.claim import Claimed
from quire.queue.request.claims import Claim
from quire.tracing import TRACE_HEADER
from quire.wire.protocol import GenerationRequest
from service.shared.logs import trace_ids
from service.worker.model.adapters import (
    fingerprint_with,
    is_same_adapter,
    is_same_chat,
    known_adapter,
    with_chat_mark,
)
from service.worker.model.served import ServedModel
from service.worker.outgoing.completions import Origin

#: The broker's clock counts as another one after it moved so many seconds against ours.
CLOCK_STEP_SECONDS = 1.0


class QueueClock:
    """Turns arrivals, in microseconds of the broker's clock, into readings of ours.

    All requests have the same offset. If each one had its own, two requests that arrived within the
    error of its measurement could change their order. Only a step of a clock gives a new offset.
    """

    def __init__(self) -> None:
        self._offset: float | None = None

    def reading(self, arrival_us: int, *, now_ms: int, received: float) -> float:
        """The arrival on our clock. `now_ms` and `received` are one moment on both clocks."""
        offset = received - now_ms / 1000
        if self._offset is None or abs(offset - self._offset) > CLOCK_STEP_SECONDS:
            self._offset = offset
        return arrival_us / 1_000_000 + self._offset


def origin_of(
    claimed: Claimed,
    request: GenerationRequest | None,
    *,
    priority: Priority,
    now_ms: int,
    received: float,
    arrived: float,
    served: ServedModel,
    model: str,
) -> Origin:
    """The Origin of a claim.

    The claim was made at `now_ms` on the broker's clock (milliseconds) and at `received` on the
    worker's clock (seconds). `arrived` is the arrival of the request on the worker's clock; see
    QueueClock. `request` is None if its envelope is invalid.
    """
    adapter, fingerprint = None, served.fingerprint
    if request is not None:
        adapter = known_adapter(request, model=model, known=served.adapters)
    if adapter is not None:
        fingerprint = fingerprint_with(fingerprint, adapter, revision=served.adapters[adapter])
    is_other = claimed.fingerprint != fingerprint and claimed.num_published > 0
    return Origin(
        request_id=claimed.claim.request_id,
        model=model,
        adapter=adapter,
        fingerprint=fingerprint,
        class_labels=served.vectors.labels if served.vectors is not None else (),
        priority=priority,
        tenant=request.tenant if request else "default",
        kind=request.kind if request else "",
        attempts=claimed.attempts,
        trial_tokens=claimed.trial_tokens,
        epoch=claimed.claim.epoch,
        received=received,
        arrived=arrived,
        due=None if claimed.due_ms is None else received + (claimed.due_ms - now_ms) / 1000,
        answer_limit=claimed.answer_limit,
        # A request that was scheduled for later has only waited since its scheduled time.
        waited_seconds=seconds_since(
            max(claimed.enqueued_ms, (request and request.not_before_ms) or 0), now_ms
        ),
        num_resumed_tokens=claimed.num_published,
        other_fingerprint=(claimed.fingerprint or "") if is_other else None,
        trace_ids=trace_ids(request.headers) if request else {},
        traceparent=request.headers.get(TRACE_HEADER, "") if request else "",
    )


def decoded(data: bytes) -> tuple[GenerationRequest | None, InvalidRequest | None]:
    """The request, or the error in its envelope. ProtocolError if it cannot be decoded."""
    try:
        return GenerationRequest.decode(data), None
    except InvalidRequest as error:
        return None, error


def with_changed_chat(origin: Origin) -> Origin:
    """The Origin of a chat of which earlier versions made another prompt."""
    fingerprint, before = with_chat_mark(origin.fingerprint), None
    if origin.num_resumed_tokens > 0:
        before = origin.other_fingerprint
        before = origin.fingerprint if before is None else before
    other = None if before == fingerprint else before
    return replace(origin, fingerprint=fingerprint, other_fingerprint=other)


def is_resumable(origin: Origin) -> bool:
    """Whether the output so far can be continued here.

    The output of another engine can be continued. The output of another revision of the adapter
    cannot, and neither can that of a chat that was encoded to another prompt.
    """
    before, here = origin.other_fingerprint, origin.fingerprint
    return before is None or (is_same_adapter(before, here) and is_same_chat(before, here))


def key_of(claim: Claim) -> str:
    """The key of a claim inside this worker; every claim of a request has another one."""
    return f"{claim.request_id}@{claim.epoch}.{claim.owner}"


def seconds_since(moment_ms: int, now_ms: int) -> float:
    """Seconds on the broker's clock. Never negative: the clock may jump back after a failover."""
    return max(0, now_ms - moment_ms) / 1000
