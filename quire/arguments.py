"""What a caller of the client may say about one request, and the message that is made of it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from quire.errors import InvalidRequest
from quire.protocol import GenerationRequest, Kind, Priority
from quire.sampling import SamplingParams, validated

#: A drawn seed has this many bits.
SEED_BITS = 63


class RequestOptions(TypedDict, total=False):
    """Everything but the prompt; see `Client.submit`."""

    messages: Sequence[Mapping[str, Any]] | None
    sampling: SamplingParams | Mapping[str, Any] | None
    priority: str | int | Priority
    #: Seconds from now.
    deadline: float | None
    model: str | None
    tenant: str | None
    #: Minted when missing.
    request_id: str | None
    idempotency_key: str | None
    metadata: Mapping[str, Any] | None
    headers: Mapping[str, str] | None


class RequestArguments(RequestOptions, total=False):
    """All of it, as `Client.submit_many` takes it."""

    prompt: str | Sequence[int] | None


#: The arguments that are fields of the message, under the same name.
_ENVELOPE = ("priority", "idempotency_key", "metadata", "headers", "tenant")


def build_request(
    arguments: RequestArguments, *, tenant: str, now_ms: int | None
) -> GenerationRequest:
    """The checked message. `now_ms` is the broker's clock, for a deadline. InvalidRequest."""
    for name in arguments:
        if name not in _ARGUMENTS:
            raise InvalidRequest(name, "unknown argument")
    kind, body = _subject(arguments.get("prompt"), arguments.get("messages"))
    sampling = arguments.get("sampling")
    if not isinstance(sampling, SamplingParams):
        sampling = validated(SamplingParams, sampling or {}, prefix="sampling.")
    body |= sampling.to_body()
    # A generation that is resumed elsewhere must go on with the same noise.
    body.setdefault("seed", secrets.randbits(SEED_BITS))
    if arguments.get("model") is not None:
        body["model"] = arguments["model"]
    fields = {name: arguments.get(name) for name in _ENVELOPE} | {"id": arguments.get("request_id")}
    if (deadline := arguments.get("deadline")) is not None:
        assert now_ms is not None, "a deadline needs the broker's clock"
        fields["deadline_ms"] = now_ms + _milliseconds(deadline)
    given = {name: value for name, value in fields.items() if value is not None}
    message = {"tenant": tenant, **given, "kind": kind, "body": body}
    request = validated(GenerationRequest, message)
    request.parse_body()
    return request


_ARGUMENTS = frozenset(RequestArguments.__optional_keys__)


def _subject(
    prompt: str | Sequence[int] | None, messages: Sequence[Mapping[str, Any]] | None
) -> tuple[Kind, dict[str, Any]]:
    if (prompt is None) == (messages is None):
        raise InvalidRequest("prompt", "give either a prompt or messages")
    if messages is not None:
        return "chat.completions", {"messages": [dict(message) for message in messages]}
    if isinstance(prompt, str):
        return "completions", {"prompt": prompt}
    return "tokens", {"prompt": list(prompt or ())}


def _milliseconds(deadline: float) -> int:
    if not 0 < deadline < float("inf"):
        raise InvalidRequest("deadline", "must be a positive number of seconds")
    return max(1, int(deadline * 1000))
