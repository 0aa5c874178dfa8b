"""Batches over HTTP and the batchers that run them. Each batcher exports its own metrics."""

from ops.grafana.panel import Panel, Row, Target
from ops.grafana.queries import BATCHERS, QUEUES, largest, rate, total

BATCHER_ROW = Row(
    "Batches",
    [
        Panel(
            title="Batches of the queue",
            description="Batches that have not ended. free: no batcher holds them. With a queue: "
            "as the exporter reads them.",
            unit="short",
            targets=[
                Target(
                    largest("quire_queue_batches", "queue, state", QUEUES), "{{queue}} {{state}}"
                ),
                Target(largest("quire_batcher_queue_batches", "state", BATCHERS), "{{state}}"),
            ],
        ),
        Panel(
            title="Running batches",
            description="Batches that the batchers run, and the most that they run at once.",
            unit="short",
            targets=[Target(total("quire_batcher_batches", "state", BATCHERS), "{{state}}")],
        ),
        Panel(
            title="Lines of batches",
            description="Lines that got a result or an error.",
            unit="cps",
            targets=[Target(rate("quire_batcher_lines_total", "outcome", BATCHERS), "{{outcome}}")],
        ),
        Panel(
            title="Claims of batches",
            description="By how they ended. Five endings lead to another claim. drained: given "
            "back by a batcher that ends. lost: another batcher holds the batch. unavailable: "
            "Redis did not answer. storage: the storage of files failed. defect: see the log.",
            unit="cps",
            targets=[
                Target(rate("quire_batcher_claims_total", "ending", BATCHERS), "{{ending}}"),
                Target(rate("quire_batcher_deleted_total", "kind", BATCHERS), "deleted {{kind}}"),
            ],
        ),
        Panel(
            title="Contact of batchers",
            description="Time since Redis last answered each batcher.",
            unit="s",
            targets=[
                Target(
                    largest("quire_batcher_seconds_since_contact", "instance", BATCHERS),
                    "{{instance}}",
                )
            ],
        ),
    ],
)
