"""Determines a claimed request's Origin, and whether its tokens can be continued here.

Knows no queue and no thread: all follows from the claim, the request and the model.
"""

from dataclasses import replace

from engine.request import Priority
from quire.errors import InvalidRequest
from quire.transitions.values import Claim, Claimed
from quire.wire.protocol import GenerationRequest
from service.model.adapters import (
    fingerprint_with,
    is_same_adapter,
    is_same_chat,
    known_adapter,
    with_chat_mark,
)
from service.model.served import ServedModel
from service.outgoing.completions import Origin
from service.settings.logs import trace_ids


def origin_of(
    claimed: Claimed,
    request: GenerationRequest | None,
    *,
    priority: Priority,
    now_ms: int,
    received: float,
    served: ServedModel,
    model: str,
) -> Origin:
    """The Origin of a claim made at `now_ms` on the broker's clock and `received` on ours.

    `request` is None if its envelope is invalid.
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
        priority=priority,
        tenant=request.tenant if request else "default",
        kind=request.kind if request else "",
        attempts=claimed.attempts,
        trial_tokens=claimed.trial_tokens,
        epoch=claimed.claim.epoch,
        received=received,
        # A request scheduled for later has waited since it was due.
        waited_seconds=seconds_since(
            max(claimed.enqueued_ms, (request and request.not_before_ms) or 0), now_ms
        ),
        num_resumed_tokens=claimed.num_published,
        other_fingerprint=(claimed.fingerprint or "") if is_other else None,
        trace_ids=trace_ids(request.headers) if request else {},
    )


def decoded(data: bytes) -> tuple[GenerationRequest | None, InvalidRequest | None]:
    """The request, or what is wrong with its envelope. ProtocolError if it cannot be decoded."""
    try:
        return GenerationRequest.decode(data), None
    except InvalidRequest as error:
        return None, error


def with_control_text(origin: Origin) -> Origin:
    """The Origin of a chat whose messages contain the text of control tokens."""
    fingerprint, before = with_chat_mark(origin.fingerprint), None
    if origin.num_resumed_tokens > 0:
        before = origin.other_fingerprint
        before = origin.fingerprint if before is None else before
    other = None if before == fingerprint else before
    return replace(origin, fingerprint=fingerprint, other_fingerprint=other)


def is_resumable(origin: Origin) -> bool:
    """Whether its tokens can be continued: those of another engine can.

    Those of another revision of the adapter cannot, nor those of a chat that was another prompt.
    """
    before, here = origin.other_fingerprint, origin.fingerprint
    return before is None or (is_same_adapter(before, here) and is_same_chat(before, here))


def key_of(claim: Claim) -> str:
    """The claim's name inside this worker, different for every claim of the same request."""
    return f"{claim.request_id}@{claim.epoch}.{claim.owner}"


def seconds_since(moment_ms: int, now_ms: int) -> float:
    """Seconds on the broker's clock, never negative: clocks of a failed-over server may jump."""
    return max(0, now_ms - moment_ms) / 1000
