"""The gateways as their callers see them. Each gateway exports its own metrics."""

from ops.grafana.panel import Panel, Row, Target
from ops.grafana.queries import GATEWAYS, quantiles, rate, total

GATEWAY_ROW = Row(
    "Gateways",
    [
        Panel(
            title="Responses",
            description="By route and status. 499: the caller had disconnected before the answer "
            "began.",
            unit="reqps",
            targets=[
                Target(
                    f"{rate('quire_gateway_responses_total', 'route, status', GATEWAYS)} > 0",
                    "{{route}} {{status}}",
                )
            ],
            is_stacked=True,
        ),
        Panel(
            title="First token over HTTP",
            description="From the call for a stream to its first token, including the wait in the "
            "queue.",
            unit="s",
            targets=quantiles("quire_gateway_first_token_seconds", GATEWAYS),
        ),
        Panel(
            title="Open answers",
            description="Open whole answers and streams, and the limit. Further calls get 503.",
            unit="short",
            targets=[Target(total("quire_gateway_open_answers", "kind", GATEWAYS), "{{kind}}")],
        ),
        Panel(
            title="Broken streams",
            description="Streams that ended with an error, and streams that were resumed after "
            "the last event that the caller had.",
            unit="cps",
            targets=[
                Target(
                    rate("quire_gateway_streams_broken_total", "reason", GATEWAYS), "{{reason}}"
                ),
                Target(rate("quire_gateway_streams_resumed_total", "", GATEWAYS), "resumed"),
            ],
        ),
        Panel(
            title="Disconnects",
            description="Callers that disconnected before the end. Their requests were cancelled, "
            "or continue because the caller may come back. late: cancelled when Redis is back.",
            unit="cps",
            targets=[
                Target(rate("quire_gateway_hang_ups_total", "outcome", GATEWAYS), "{{outcome}}")
            ],
        ),
    ],
)
