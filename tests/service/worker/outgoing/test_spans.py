"""The spans of claims, as a collector receives them by OTLP over HTTP."""

import asyncio
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire.client.client import Client
from quire.client.client_async import AsyncClient
from quire.tracing import NO_HEADERS, sending
from quire.wire.arguments import RequestArguments
from quire.wire.protocol import MAX_HEADERS_BYTES, GenerationRequest
from service.shared.settings.sources import ConfigurationError
from service.worker.outgoing.spans import FLUSH_SECONDS, span_id_of, trace_id_of
from service.worker.process import parts
from tests.service.builders import (
    Queue,
    StepGate,
    WorkerThread,
    eventually,
    expected_tokens,
    http_get,
    left_in_the_middle,
)
from tests.service.processes import WorkerProcess

TRACE, CALLER = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
SAMPLED = f"00-{TRACE:032x}-{CALLER:016x}-01"
NOT_SAMPLED = f"00-{TRACE:032x}-{CALLER:016x}-00"


class Collector:
    """A server that takes spans by OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def claims(self, request_id: str) -> list[Span]:
        """The spans of the claims of a request, in the order of their epochs."""
        found = [one for one in self.spans if told(one).get("messaging.message.id") == request_id]
        return sorted(found, key=lambda one: int(told(one)["quire.epoch"]))

    def phases(self, claim: Span) -> dict[str, Span]:
        return {one.name: one for one in self.spans if one.parent_span_id == claim.span_id}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


def told(span: Span) -> dict[str, Any]:
    """The attributes of a span."""
    return {
        one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes
    }


def number(data: bytes) -> int:
    return int.from_bytes(data, "big")


def test_a_claim_is_a_span_in_the_trace_of_its_submit_and_its_phases_are_parts_of_it(
    queue: Queue, collector: Collector
):
    request_id = queue.submit((1, 2, 3), max_tokens=8, headers={"traceparent": SAMPLED})
    with WorkerThread(queue.settings(traces="otlp")) as worker:
        queue.result(request_id)
        accept = "application/openmetrics-text"
        port = worker.worker.http_port

        def page_with_the_trace() -> str:
            page = http_get(port, "/metrics", accept=accept)[1]
            return page if f'trace_id="{TRACE:032x}"' in page else ""

        # The publisher observes a request after its end is in Redis.
        metrics = eventually(page_with_the_trace)
    (claim,) = collector.claims(request_id)
    assert (number(claim.trace_id), number(claim.parent_span_id)) == (TRACE, CALLER)
    assert claim.name == f"process {queue.name}" and claim.kind == Span.SPAN_KIND_CONSUMER
    facts = told(claim)
    assert facts["gen_ai.usage.input_tokens"] == 3 and facts["gen_ai.usage.output_tokens"] == 8
    assert facts["quire.outcome"] == facts["gen_ai.response.finish_reasons"] == "length"
    phases = collector.phases(claim)
    assert sorted(phases) == ["decode", "prefill", "publish", "queue", "wait"]
    names = ("queue", "wait", "prefill", "decode", "publish")
    moments = [phases[name].start_time_unix_nano for name in names]
    ends = [phases[name].end_time_unix_nano for name in names]
    # Each phase begins where the one before it ends, to the rounding of the conversion.
    assert all(abs(a - b) < 1000 for a, b in zip(ends, moments[1:], strict=False))
    assert moments == sorted(moments)
    assert ends[-1] == claim.end_time_unix_nano and ends[0] == claim.start_time_unix_nano
    assert f'span_id="{number(claim.span_id):016x}"' in metrics


def test_a_takeover_is_a_span_of_the_same_trace_with_a_link_to_the_claim_before(
    queue: Queue, collector: Collector
):
    """Without a caller's trace, too: then the trace is a function of the request."""
    request_id = queue.submit((1, 2, 3), max_tokens=300)
    left_in_the_middle(queue, request_id, settings={"traces": "otlp"})
    with WorkerThread(queue.settings(traces="otlp")):
        assert queue.result(request_id).token_ids == expected_tokens((1, 2, 3), max_tokens=300)
    first, second = collector.claims(request_id)
    assert told(first)["quire.outcome"] == "released"
    assert told(second)["quire.resumed_tokens"] == told(first)["quire.published_tokens"] >= 4
    assert number(first.trace_id) == number(second.trace_id) == trace_id_of(request_id)
    (link,) = second.links
    assert link.span_id == first.span_id and link.trace_id == first.trace_id
    assert not first.links and number(first.span_id) == span_id_of(request_id, 1)
    assert "queue" in collector.phases(first) and "queue" not in collector.phases(second)


def test_a_claim_that_is_lost_or_refused_says_so(queue: Queue, collector: Collector):
    refused = queue.submit((10**7,), max_tokens=4)
    request_id = queue.submit((1, 2, 3), max_tokens=300)
    gate = StepGate(steps=0)
    # No keeper reaps between the two calls of `take_away`: there would be a third claim.
    settings = queue.settings(traces="otlp", lease_seconds=60.0)
    with WorkerThread(settings, before_run=gate):
        gate.step_until(lambda: queue.published(request_id) >= 2)
        queue.take_away(request_id)
        gate.open()
        queue.result(request_id)
        queue.result(refused)
    lost, second = collector.claims(request_id)
    assert second.links[0].span_id == lost.span_id
    assert told(lost)["quire.outcome"] == "lost" and told(second)["quire.outcome"] == "length"
    (claim,) = collector.claims(refused)
    assert claim.status.code == 2 and claim.status.message == "invalid_request"
    assert sorted(collector.phases(claim)) == ["queue", "wait"]


def test_a_trace_that_its_caller_does_not_record_has_no_spans_and_no_exemplars(
    queue: Queue, collector: Collector
):
    request_id = queue.submit((1, 2, 3), headers={"traceparent": NOT_SAMPLED})
    with WorkerThread(queue.settings(traces="otlp")) as worker:
        queue.result(request_id)
        accept = "application/openmetrics-text"
        assert "trace_id" not in http_get(worker.worker.http_port, "/metrics", accept=accept)[1]
    assert collector.spans == []


def test_a_collector_that_cannot_be_reached_costs_no_request(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    request_id = queue.submit((1, 2, 3), max_tokens=8)
    with WorkerThread(queue.settings(traces="otlp")) as worker:
        assert queue.result(request_id).token_ids == expected_tokens((1, 2, 3), max_tokens=8)
    assert worker.exit_code == 0


@pytest.fixture(params=["refuses", "hangs"])
def bad_collector(request, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A collector that takes no span before the SDK gives up, which is after half a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        if request.param == "refuses":
            server.close()
        yield


@pytest.mark.processes
def test_a_worker_does_not_wait_for_a_collector_that_takes_nothing(queue: Queue, bad_collector):
    with WorkerProcess(queue, "--traces", "otlp") as worker:
        queue.result(queue.submit((1, 2, 3), max_tokens=8))
        worker.signal(signal.SIGTERM)
        begin = time.monotonic()
        assert worker.wait() == 0
        assert time.monotonic() - begin < 6 * FLUSH_SECONDS


def test_a_worker_without_the_packages_says_which_extra_it_needs(queue: Queue, monkeypatch):
    monkeypatch.setitem(sys.modules, "service.worker.outgoing.spans", None)
    with pytest.raises(ConfigurationError, match="extra `otel`"):
        parts._traces(queue.settings(traces="otlp"), ())


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What a traced program has: a provider that keeps the spans here."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def request_of(queue: Queue, request_id: str) -> GenerationRequest:
    data = queue.connection.get(queue.keys.body(request_id))
    return GenerationRequest.decode(data)


def test_requests_of_a_submit_carry_the_span_of_the_submit(
    queue: Queue, exporter: InMemorySpanExporter
):
    own = {"traceparent": SAMPLED}
    client = Client(queue.broker)
    both: list[RequestArguments] = [
        {"prompt": "a", "request_id": "1"},
        {"prompt": "b", "request_id": "2", "headers": own},
    ]
    client.submit_many(both, group="g")
    choices = client.submit_choices("c", n=2)

    async def submit() -> str:
        async with AsyncClient(queue.url, queue=queue.name) as other:
            return (await other.submit("d")).request_id

    last = asyncio.run(submit())
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == [f"submit {queue.name}"] * 3
    assert [span.attributes["messaging.batch.message_count"] for span in spans] == [2, 2, 1]
    first, of_choices, of_last = (header_of(span.context) for span in spans)
    assert request_of(queue, "g~1").headers == {"traceparent": first}
    assert request_of(queue, "g~2").headers == own
    for choice in choices:
        assert request_of(queue, choice.request_id).headers == {"traceparent": of_choices}
    assert request_of(queue, last).headers == {"traceparent": of_last}


def header_of(context: Any) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def test_a_header_that_has_no_room_is_left_out(queue: Queue, exporter: InMemorySpanExporter):
    headers = {"x": "y" * (MAX_HEADERS_BYTES - 10)}
    handle = Client(queue.broker).submit("a", headers=headers)
    assert request_of(queue, handle.request_id).headers == headers
    assert len(exporter.get_finished_spans()) == 1


def test_a_program_without_opentelemetry_pays_one_lookup(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with sending("q", num_requests=1) as headers:
        assert headers is NO_HEADERS
