"""The register of the gateway's metrics; `service.worker.observe` has the worker's."""

from service.shared.families import FIRST_TOKEN, NONE, MetricFamily

#: The values of the label `route`.
ROUTES = (
    *("chat.completions", "completions", "embeddings", "scores", "responses", "models"),
    *("requests", "events", "cancel"),
    *("files", "file_content", "batches"),
)

#: Every status of a response. 499: the caller had gone before the response began.
STATUSES = (
    *("200", "204", "303", "400", "401", "403", "404", "405", "408", "409", "413", "415", "422"),
    *("429", "499", "500", "503", "504"),
)

GATEWAY_REGISTER: tuple[MetricFamily, ...] = (
    MetricFamily(
        "counter",
        "quire_gateway_responses_total",
        {"route": ROUTES, "status": STATUSES},
        "Responses by route and status. A stream counts with the status that it began with; 499: "
        "the caller had gone before the response began.",
    ),
    MetricFamily(
        "gauge",
        "quire_gateway_open_answers",
        {"kind": ("limit", "open")},
        "Open answers, complete ones and streams together, and the most that may be open.",
    ),
    MetricFamily(
        "histogram",
        "quire_gateway_first_token_seconds",
        NONE,
        "Time from a call for a stream to its first token, including the wait in the queue.",
        FIRST_TOKEN,
    ),
    MetricFamily(
        "counter",
        "quire_gateway_streams_resumed_total",
        NONE,
        "Streams that continued after the last event a caller had.",
    ),
    MetricFamily(
        "counter",
        "quire_gateway_streams_broken_total",
        {"reason": ("failed", "unavailable", "rewound", "draining")},
        "Streams that ended in an error: the request failed, Redis did not answer or had lost "
        "tokens that were sent, or the gateway ended first.",
    ),
    MetricFamily(
        "counter",
        "quire_gateway_hang_ups_total",
        {"outcome": ("cancelled", "left", "late")},
        "Callers that disconnected before the end of their answer. `cancelled`: the requests were "
        "cancelled. `left`: the requests go on, because callers with an idempotency key, and those "
        "that only read, may come back. `late`: Redis did not answer, and the requests are "
        "cancelled when it is back.",
    ),
)


def gateway_families() -> dict[str, MetricFamily]:
    """The gateway's metrics by name."""
    return {family.name: family for family in GATEWAY_REGISTER}
