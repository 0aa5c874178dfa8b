"""What callers over HTTP see of the gateways; each of these tells of itself."""

from ops.grafana.panel import Panel, Row, Target
from ops.grafana.queries import GATEWAYS, quantiles, rate, total

GATEWAY_ROW = Row(
    "Gateways",
    [
        Panel(
            title="Responses",
            description="By what was asked and with which status the answer began. 499: the caller "
            "had gone before there was one.",
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
            description="From a call for a stream to its first token, the wait in the queue "
            "included.",
            unit="s",
            targets=quantiles("quire_gateway_first_token_seconds", GATEWAYS),
        ),
        Panel(
            title="Open answers",
            description="Whole answers and streams under way, and how many may be. What comes "
            "beyond is refused with 503.",
            unit="short",
            targets=[Target(total("quire_gateway_open_answers", "kind", GATEWAYS), "{{kind}}")],
        ),
        Panel(
            title="Broken streams",
            description="Streams that ended in an error, and streams that went on behind the last "
            "event of their caller.",
            unit="cps",
            targets=[
                Target(
                    rate("quire_gateway_streams_broken_total", "reason", GATEWAYS), "{{reason}}"
                ),
                Target(rate("quire_gateway_streams_resumed_total", "", GATEWAYS), "resumed"),
            ],
        ),
        Panel(
            title="Hang-ups",
            description="Callers that went before the end. Their requests were cancelled, or left "
            "to go on for a caller that comes back; late: Redis hears of it when it is back.",
            unit="cps",
            targets=[
                Target(rate("quire_gateway_hang_ups_total", "outcome", GATEWAYS), "{{outcome}}")
            ],
        ),
    ],
)
