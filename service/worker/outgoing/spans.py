"""What a claim did, as OpenTelemetry spans. Imported only by a worker that traces (extra `otel`).

A claim is a span of kind CONSUMER in the trace of its submit, whose ids are in the header
`traceparent` of the request. Its children are the phases: prefill, decode and the others of
`_phases_of`. The wait in the queue is a span beside it, since it ends before the claim begins.
Names and attributes follow the semantic conventions of messaging and of generative AI
(https://opentelemetry.io/docs/specs/semconv/).

The ids of a claim's span are functions of the request and the epoch. So the span of a takeover can
link to that of the claim before, whose worker may have died without sending one. All spans of a
claim are made when it ends: while it runs, tracing costs nothing.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire.tracing import TRACE_HEADER
from quire.version import quire_version
from service.worker.outgoing.delivery import Delivery
from service.worker.outgoing.traces import Exemplar

NANOSECONDS = 1_000_000_000
TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8

#: A claim adds one to the epoch of a request, and so does each way in which a claim can end without
#: the request: RELEASE, REAP and FAIL.
EPOCHS_PER_CLAIM = 2

#: How long the end of a worker waits for a collector that refuses spans, or does not answer.
FLUSH_SECONDS = 3.0

#: An attribute's value.
Value = str | int | float | bool


class SpanTraces:
    """Makes the spans of each claim that ends, and gives them to `processor`.

    The times of a delivery are readings of `clock`, in seconds. The variables of OpenTelemetry
    (`OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, ...) hold.
    """

    def __init__(
        self,
        processor: SpanProcessor,
        *,
        queues: Mapping[int, str],
        worker: str,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._ids = _ClaimIds()
        resource = Resource.create({"service.name": "quire-worker", "service.instance.id": worker})
        self._provider = TracerProvider(
            id_generator=self._ids, resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("quire", quire_version())
        self._queues, self._clock = queues, clock

    def ended(self, delivery: Delivery, outcome: str) -> Exemplar | None:
        """Make the spans of a claim that ends now; returns the ids of its span if it is sampled."""
        now, origin = self._clock(), delivery.origin
        offset = time.time() - now
        caller = TraceContextTextMapPropagator().extract({TRACE_HEADER: origin.traceparent})

        def span(name: str, begin: float, end: float, inside: Span) -> None:
            start = int((begin + offset) * NANOSECONDS)
            part = self._tracer.start_span(name, set_span_in_context(inside), start_time=start)
            part.end(int((end + offset) * NANOSECONDS))

        with self._ids.of(origin.request_id, origin.epoch):
            claim = self._tracer.start_span(
                f"process {self._queues[delivery.place]}",
                caller,
                SpanKind.CONSUMER,
                self._attributes_of(delivery, outcome),
                list(self._links_of(delivery, get_current_span(caller).get_span_context())),
                int((origin.received + offset) * NANOSECONDS),
            )
        if not claim.is_recording():
            return None
        failure = delivery.failure or (delivery.completion and delivery.completion.error)
        if failure:
            claim.set_status(Status(StatusCode.ERROR, failure.code))
        if origin.epoch == 1:
            span("queue", origin.received - origin.waited_seconds, origin.received, claim)
        for name, begin, end in _phases_of(delivery, now):
            span(name, begin, end, claim)
        claim.end(int((now + offset) * NANOSECONDS))
        context = claim.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    def close(self) -> None:
        """Send the last spans, for FLUSH_SECONDS at most; those that are left are lost."""
        # The SDK waits for half a minute. It would also flush at the exit of the interpreter, if
        # the provider were not told otherwise.
        flush = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        flush.start()
        flush.join(FLUSH_SECONDS)

    def _attributes_of(self, delivery: Delivery, outcome: str) -> dict[str, Value]:
        origin, done = delivery.origin, delivery.completion
        attributes: dict[str, Value] = {
            "messaging.system": "redis",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": self._queues[delivery.place],
            "messaging.message.id": origin.request_id,
            "gen_ai.operation.name": "chat"
            if origin.kind == "chat.completions"
            else "text_completion",
            "gen_ai.request.model": origin.model_name,
            "gen_ai.response.model": origin.model,
            "quire.outcome": outcome,
            "quire.epoch": origin.epoch,
            "quire.attempts": origin.attempts,
            "quire.tenant": origin.tenant,
            "quire.priority": origin.priority_name,
            "quire.resumed_tokens": origin.num_resumed_tokens,
            "quire.published_tokens": delivery.published,
        }
        if done is not None:
            attributes["gen_ai.response.finish_reasons"] = str(done.finish_reason)
            attributes["gen_ai.usage.input_tokens"] = done.usage.prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = done.usage.completion_tokens
            attributes["quire.preemptions"] = done.preemptions
        return attributes

    def _links_of(self, delivery: Delivery, caller: SpanContext) -> Iterator[Link]:
        """The claim before this one, if there was one."""
        name, epoch = delivery.origin.request_id, delivery.origin.epoch - EPOCHS_PER_CLAIM
        if epoch > 0:
            trace_id = caller.trace_id if caller.is_valid else trace_id_of(name)
            before = SpanContext(
                trace_id,
                span_id_of(name, epoch),
                is_remote=True,
                trace_flags=TraceFlags(TraceFlags.SAMPLED),
            )
            yield Link(before, {"quire.epoch": epoch})


class _ClaimIds(RandomIdGenerator):
    """Random ids, except for a span that is started inside of `of`."""

    def __init__(self) -> None:
        self._here = threading.local()

    @contextmanager
    def of(self, request_id: str, epoch: int) -> Iterator[None]:
        """The span that this thread starts inside has the ids of this claim."""
        self._here.ids = trace_id_of(request_id), span_id_of(request_id, epoch)
        try:
            yield
        finally:
            del self._here.ids

    def generate_trace_id(self) -> int:
        """The trace of a span without a caller."""
        ids = getattr(self._here, "ids", None)
        return ids[0] if ids else super().generate_trace_id()

    def generate_span_id(self) -> int:
        """The id of a new span."""
        ids = getattr(self._here, "ids", None)
        return ids[1] if ids else super().generate_span_id()


def otlp_traces(*, queues: Mapping[int, str], worker: str) -> SpanTraces:
    """Spans for a collector, by OTLP over HTTP; `OTEL_EXPORTER_OTLP_ENDPOINT` names it.

    `queues`: the queue of each place.
    """
    exporter = BatchSpanProcessor(OTLPSpanExporter())
    return SpanTraces(exporter, queues=queues, worker=worker)


def trace_id_of(request_id: str) -> int:
    """The trace of a request whose caller has none: the same for all of its claims."""
    return _number(TRACE_ID_BYTES, request_id)


def span_id_of(request_id: str, epoch: int) -> int:
    """The span of one claim of a request."""
    return _number(SPAN_ID_BYTES, f"{request_id} {epoch}")


def _number(num_bytes: int, text: str) -> int:
    # Zero is no valid id.
    digest = hashlib.blake2b(text.encode(), digest_size=num_bytes).digest()
    return int.from_bytes(digest, "big") or 1


def _phases_of(delivery: Delivery, now: float) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of each phase that the claim has begun; the last one may be cut short."""
    request, received = delivery.request, delivery.origin.received
    times = request.times if request is not None else None
    if times is None or times.first_scheduled is None:
        yield "wait", received, now
        return
    finished = times.finished if times.finished is not None else now
    yield "wait", received, times.first_scheduled
    yield "prefill", times.first_scheduled, times.first_token or finished
    if times.first_token is not None:
        yield "decode", times.first_token, finished
    if times.finished is not None:
        yield "publish", finished, now
