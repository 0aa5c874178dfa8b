"""The caller's OpenTelemetry trace: one span for each submit, whose ids go with the requests.

Follows the semantic conventions of messaging (https://opentelemetry.io/docs/specs/semconv/messaging/).
A program that traces has imported `opentelemetry` itself, so this module imports it only then. In
all other programs a submit costs one lookup more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from quire.version import quire_version

#: The header with the ids of the span that a request was sent by
#: (https://www.w3.org/TR/trace-context/#traceparent-header).
TRACE_HEADER = "traceparent"

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@contextmanager
def sending(queue: str, *, num_requests: int) -> Iterator[Mapping[str, str]]:
    """A span of kind PRODUCER around a submit; yields the headers for its requests.

    The headers are empty if the program does not use OpenTelemetry. With the API alone, and inside
    a span of the caller, they have that span. An error of the submit is recorded in the span.
    """
    if "opentelemetry.trace" not in sys.modules:
        yield NO_HEADERS
        return
    # Inside the function: most programs that use this package do not have the library.
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    tracer = trace.get_tracer("quire", quire_version())
    attributes: dict[str, str | int] = {
        "messaging.system": "redis",
        "messaging.operation.name": "submit",
        "messaging.operation.type": "send",
        "messaging.destination.name": queue,
        "messaging.batch.message_count": num_requests,
    }
    with tracer.start_as_current_span(
        f"submit {queue}", kind=trace.SpanKind.PRODUCER, attributes=attributes
    ):
        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers)
        yield headers
