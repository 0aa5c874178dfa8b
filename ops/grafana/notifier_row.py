"""Webhooks and the notifiers that post them. Each notifier exports its own metrics."""

from ops.grafana.panel import Panel, Row, Target
from ops.grafana.queries import NOTIFIERS, largest, quantiles, rate

NOTIFIER_ROW = Row(
    "Webhooks",
    [
        Panel(
            title="Ends",
            description="Ends of requests, batches and groups by what became of them. kept: a "
            "webhook waits to be posted. unwanted: no endpoint asks for it. dropped: too many "
            "webhooks of its tenant wait.",
            unit="cps",
            targets=[Target(rate("quire_notifier_ends_total", "fate", NOTIFIERS), "{{fate}}")],
        ),
        Panel(
            title="Posted webhooks",
            description="Attempts by how they ended. taken: answered with 2xx. status: answered "
            "otherwise. timeout: not answered in time. connection: no connection.",
            unit="cps",
            targets=[
                Target(rate("quire_notifier_posts_total", "outcome", NOTIFIERS), "{{outcome}}"),
                Target(
                    rate("quire_notifier_given_up_total", "reason", NOTIFIERS),
                    "given up: {{reason}}",
                ),
            ],
        ),
        Panel(
            title="Waiting webhooks",
            description="Webhooks of the queue that wait. due: now. later: being posted, or after "
            "a pause.",
            unit="short",
            targets=[
                Target(largest("quire_notifier_queue_webhooks", "state", NOTIFIERS), "{{state}}"),
                Target(largest("quire_notifier_open_circuits", "", NOTIFIERS), "endpoints alone"),
            ],
        ),
        Panel(
            title="Delay of webhooks",
            description="Time from an end to the begin of the attempt that its endpoint took.",
            unit="s",
            targets=quantiles("quire_notifier_delay_seconds", NOTIFIERS),
        ),
        Panel(
            title="Contact of notifiers",
            description="Time since Redis last answered each notifier.",
            unit="s",
            targets=[
                Target(
                    largest("quire_notifier_seconds_since_contact", "instance", NOTIFIERS),
                    "{{instance}}",
                )
            ],
        ),
    ],
)
