"""Reads an HTTP request: its body, and the headers with options for the queue.

The body is OpenAI's and describes the wanted answer. Options for the queue are headers, which
OpenAI's clients send as `default_headers` or `extra_headers`:

    Idempotency-Key     a repeated call with the same key is the same request, on every gateway
    X-Quire-Priority    low, normal, high or critical; at most what the API key allows
    X-Quire-Deadline    seconds from now
    X-Quire-Target-Latency  how long the call should take, in seconds
    X-Quire-Session     the session of which the call is a turn
    traceparent         the caller's trace, for the log lines of the worker
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import ClientDisconnect, Request

from quire.errors import InvalidRequest
from quire.tracing import TRACE_HEADER
from quire.wire.arguments import MAX_AHEAD_SECONDS
from quire.wire.body_fields import shows_usage_always
from quire.wire.protocol import Priority, is_session_id
from service.gateway.refusals import Refusal, Refused, unsupported_encoding
from service.shared.http.tasks import HungUp
from service.shared.logs import trace_ids

ENCODING = "Content-Encoding"
IDEMPOTENCY_KEY = "Idempotency-Key"
PRIORITY = "X-Quire-Priority"
DEADLINE = "X-Quire-Deadline"
TARGET_LATENCY = "X-Quire-Target-Latency"
SESSION = "X-Quire-Session"

#: The options of a stream about usage.
_USAGES = ("include_usage", "continuous_usage_stats")

#: OpenAI's tiers that are not the usual one.
_TIERS = {"flex": Priority.LOW, "priority": Priority.HIGH}

#: The longest idempotency key, in characters.
MAX_KEY_LENGTH = 255


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """Options for the queue, from the headers of a call.

    `key` is the idempotency key, `deadline_seconds` counts from now, and `headers` are passed on to
    the worker.
    """

    key: str | None
    priority: Priority | None
    deadline_seconds: float | None
    headers: Mapping[str, str]
    session_id: str | None = None
    target_latency_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """How to send the answer. With `shows_usage_always`, each event has the usage so far."""

    is_stream: bool
    include_usage: bool
    shows_usage_always: bool = False

    @property
    def query(self) -> str:
        """The query of a path under which the same answer is shown as a stream."""
        names = _USAGES if self.shows_usage_always else _USAGES[:1] if self.include_usage else ()
        return "?" + "&".join(f"{name}=true" for name in names) if names else ""


def queue_options_of(request: Request) -> QueueOptions:
    """Reads the headers. InvalidRequest names the invalid one."""
    key = request.headers.get(IDEMPOTENCY_KEY)
    if key is not None and not 0 < len(key) <= MAX_KEY_LENGTH:
        raise InvalidRequest(IDEMPOTENCY_KEY, f"must have 1 to {MAX_KEY_LENGTH} characters")
    trace = {TRACE_HEADER: request.headers.get(TRACE_HEADER, "")}
    return QueueOptions(
        key=key,
        priority=_priority(request.headers.get(PRIORITY)),
        deadline_seconds=_seconds(DEADLINE, request.headers.get(DEADLINE)),
        # The W3C standard says to ignore an invalid trace.
        headers=trace if trace_ids(trace) else {},
        session_id=_session(request.headers.get(SESSION)),
        target_latency_seconds=_seconds(TARGET_LATENCY, request.headers.get(TARGET_LATENCY)),
    )


def with_tier(options: QueueOptions, body: Mapping[str, Any]) -> QueueOptions:
    """The options with the priority of OpenAI's `service_tier`, if the body has one.

    InvalidRequest if the header says something else. Other values are left to the check of the
    body.
    """
    tier = body.get("service_tier")
    priority = _TIERS.get(tier) if isinstance(tier, str) else None
    if priority is None:
        return options
    if options.priority not in (None, priority):
        raise InvalidRequest("body.service_tier", f"contradicts the header {PRIORITY}")
    return replace(options, priority=priority)


def response_options_of(body: Mapping[str, Any]) -> ResponseOptions:
    """Reads `stream` and `stream_options`. InvalidRequest."""
    stream, options = body.get("stream"), body.get("stream_options")
    if not isinstance(stream, bool | None):
        raise InvalidRequest("body.stream", "must be true or false")
    if options is None:
        return ResponseOptions(bool(stream), include_usage=False)
    if not stream:
        raise InvalidRequest("body.stream_options", "needs stream to be true")
    if not isinstance(options, Mapping):
        raise InvalidRequest("body.stream_options", "must be a map")
    for name, value in options.items():
        # Events are never padded, so switching the padding off changes nothing.
        is_harmless = value is None or (name == "include_obfuscation" and value is False)
        if name not in _USAGES and not is_harmless:
            raise InvalidRequest(f"body.stream_options.{name}", "unknown field")
        if name in _USAGES and not isinstance(value, bool | None):
            raise InvalidRequest(f"body.stream_options.{name}", "must be true or false")
    return ResponseOptions(
        is_stream=True,
        include_usage=bool(options.get("include_usage")),
        shows_usage_always=shows_usage_always(options),
    )


def shown_options(query: Mapping[str, str]) -> ResponseOptions:
    """The options of a stream that is asked for by the path of its call."""
    include_usage, shows_always = (query.get(name) == "true" for name in _USAGES)
    return ResponseOptions(
        is_stream=True,
        include_usage=include_usage,
        shows_usage_always=include_usage and shows_always,
    )


async def body_of(request: Request, *, max_bytes: int, timeout_seconds: float) -> bytes:
    """The complete body. Refused if it is too long or too slow, HungUp if the caller disconnects.

    `max_bytes` is its greatest length, `timeout_seconds` the time in which all of it must arrive.
    """
    refuse_encoding(request)
    announced = request.headers.get("Content-Length", "")
    if announced.isdigit() and int(announced[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_seconds):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        message = f"the body did not come within {timeout_seconds:g} seconds"
        raise Refused(Refusal(408, "body_timeout", message)) from None
    except ClientDisconnect:
        raise HungUp from None
    return bytes(body)


def refuse_encoding(request: Request) -> None:
    """Refused for a compressed body: a small one could become any size."""
    for encoding in request.headers.getlist(ENCODING):
        if encoding.strip().lower() not in ("", "identity"):
            raise unsupported_encoding(ENCODING)


def _too_large(max_bytes: int) -> Refused:
    # On an open connection, the next call could only be read after the rest of this body.
    headers = {"Connection": "close"}
    message = f"the body takes more than {max_bytes} bytes"
    return Refused(Refusal(413, "body_too_large", message, headers=headers))


def _priority(text: str | None) -> Priority | None:
    try:
        return None if text is None else Priority.parse(text)
    except ValueError as error:
        raise InvalidRequest(PRIORITY, str(error)) from None


def _session(text: str | None) -> str | None:
    if text is not None and not is_session_id(text):
        raise InvalidRequest(SESSION, "must have 1 to 128 characters of A-Z a-z 0-9 . _ : -")
    return text


def _seconds(header: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_AHEAD_SECONDS:
        raise InvalidRequest(
            header, f"must be a positive number of seconds up to {MAX_AHEAD_SECONDS}"
        )
    return seconds
