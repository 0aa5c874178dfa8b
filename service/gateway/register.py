"""The metrics of the gateway; part of the register, see service/observe/register.py."""

from service.settings.families import FIRST_TOKEN, NONE, Family

#: What is asked of a gateway, as its metrics name it.
ROUTES = ("chat.completions", "completions", "models", "requests", "events", "cancel")

#: Every status that it answers with. 499: the caller had gone before there was an answer.
STATUSES = (
    *("200", "204", "303", "400", "401", "403", "404", "405", "408", "409", "413", "422", "429"),
    *("499", "500", "503", "504"),
)

GATEWAY_REGISTER: tuple[Family, ...] = (
    Family(
        "counter",
        "quire_gateway_responses_total",
        {"route": ROUTES, "status": STATUSES},
        "Responses by what was asked. A stream counts with the status that it began with; 499: the "
        "caller had gone before there was one.",
    ),
    Family(
        "gauge",
        "quire_gateway_open_answers",
        {"kind": ("limit", "open")},
        "Answers under way, whole ones and streams, and how many may be.",
    ),
    Family(
        "histogram",
        "quire_gateway_first_token_seconds",
        NONE,
        "From a call for a stream to the first token of it, the wait in the queue included.",
        FIRST_TOKEN,
    ),
    Family(
        "counter",
        "quire_gateway_streams_resumed_total",
        NONE,
        "Streams that went on behind the last event a caller had.",
    ),
    Family(
        "counter",
        "quire_gateway_streams_broken_total",
        {"reason": ("failed", "unavailable", "rewound", "draining")},
        "Streams that ended in an error: their request did not complete, Redis did not answer or "
        "had lost what was told, or the gateway ended first.",
    ),
    Family(
        "counter",
        "quire_gateway_hang_ups_total",
        {"outcome": ("cancelled", "left", "late")},
        "Callers that went before the end of their answer. Their requests were cancelled, or left "
        "to go on, because a caller with an idempotency key, or one that only reads, may come for "
        "the rest; late: Redis did not answer, and hears of the cancellation when it is back.",
    ),
)


def gateway_families() -> dict[str, Family]:
    """The gateway's metrics by name."""
    return {family.name: family for family in GATEWAY_REGISTER}
