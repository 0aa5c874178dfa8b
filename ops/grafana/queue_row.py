"""What waits in Redis, and how it is taken from there. The first panels are the exporter's.

They take the largest value and not the sum of what exporters tell: while one is replaced there are
two, which tell the same.
"""

from ops.grafana.panel import Panel, Row, Target
from ops.grafana.queries import MODELS, QUEUES, WORKERS, largest, quantile, rate, total

#: How long the backlog lasts at the pace of the last minutes.
DRAIN_SECONDS = (
    f"sum by (queue) ({largest('quire_queue_lag_messages', 'queue, priority', QUEUES)}) / "
    f"{rate('quire_requests_received_total', 'queue', f'{MODELS}, {QUEUES}')}"
)

QUEUE_ROW = Row(
    "Queue",
    [
        Panel(
            title="Queue backlog",
            description="Requests that no worker has read, and those that one has read and not "
            "claimed yet, by priority. The second is a matter of milliseconds.",
            unit="short",
            targets=[
                Target(
                    largest("quire_queue_lag_messages", "queue, priority", QUEUES),
                    "{{queue}} {{priority}}",
                ),
                Target(
                    largest("quire_queue_pending_messages", "queue, priority", QUEUES),
                    "{{queue}} {{priority}}, read",
                ),
            ],
            is_stacked=True,
        ),
        Panel(
            title="Oldest request",
            description="How long the first request in line has waited for a worker, by priority, "
            "and the one that was read and not claimed for longest. Unlike the wait of claimed "
            "requests it grows while nothing is claimed.",
            unit="s",
            targets=[
                Target(
                    largest(
                        "quire_queue_oldest_message_age_seconds",
                        "queue, priority",
                        QUEUES,
                        state="undelivered",
                    ),
                    "{{queue}} {{priority}}",
                ),
                Target(
                    largest(
                        "quire_queue_oldest_message_age_seconds",
                        "queue",
                        QUEUES,
                        state="pending",
                    ),
                    "{{queue}}, read and not claimed",
                ),
            ],
        ),
        Panel(
            title="Time to drain",
            description="How long the backlog would last at the pace at which requests are being "
            "claimed. Without claims it has no end.",
            unit="s",
            targets=[Target(DRAIN_SECONDS, "{{queue}}")],
        ),
        Panel(
            title="Scheduled",
            description="Requests that are not queued before a moment of their own, among them "
            "those that pause between two attempts. Due ones are queued within seconds while a "
            "worker lives.",
            unit="short",
            targets=[
                Target(
                    largest("quire_queue_scheduled_messages", "queue, state", QUEUES),
                    "{{queue}} {{state}}",
                ),
            ],
            is_stacked=True,
        ),
        Panel(
            title="Leases",
            description="Requests that run somewhere. An expired lease belongs to a worker that is "
            "gone; the others take the request over within seconds.",
            unit="short",
            targets=[
                Target(
                    largest("quire_queue_leases", "queue, state", QUEUES),
                    "{{queue}} {{state}}",
                ),
            ],
            is_stacked=True,
        ),
        Panel(
            title="Consumers",
            description="Workers that have lately signed the registry of the queue as ready.",
            unit="short",
            targets=[Target(largest("quire_queue_consumers", "queue", QUEUES), "{{queue}}")],
            kind="stat",
            width=4,
            thresholds=((None, "red"), (1, "green")),
        ),
        Panel(
            title="Dead letters kept",
            description="Messages that were given up, unreadable or their attempts spent, and wait "
            "for a person to look at them.",
            unit="short",
            targets=[Target(largest("quire_dead_letter_messages", "queue", QUEUES), "{{queue}}")],
            kind="stat",
            width=4,
            thresholds=((None, "green"), (1, "orange")),
        ),
        Panel(
            title="Memory of Redis",
            description="What Redis uses, and its maxmemory; a limit of 0 is none. Queued requests "
            "store prompts, finished ones outputs for their retention. When it is full, Redis "
            "refuses writes.",
            unit="bytes",
            targets=[
                Target("max by (job, kind) (quire_redis_memory_bytes)", "{{job}} {{kind}}"),
            ],
        ),
        Panel(
            title="Claimed requests",
            description="Requests taken from the queue per second, by priority.",
            unit="reqps",
            targets=[Target(rate("quire_requests_received_total", "priority"), "{{priority}}")],
            is_stacked=True,
        ),
        Panel(
            title="Wait in the queue, p95",
            description="From entering the ingress stream to the claim, by priority. Says nothing "
            "of requests that no worker has claimed yet: see the oldest request.",
            unit="s",
            targets=[
                Target(
                    quantile(0.95, "quire_request_stream_wait_seconds", "priority", WORKERS),
                    "{{priority}}",
                ),
            ],
        ),
        Panel(
            title="Requests in the engines",
            description="Running, waiting for a first step, and preempted. A worker claims only "
            "what it can soon run, so the backlog itself is in Redis.",
            unit="short",
            targets=[Target(total("quire_engine_requests", "state"), "{{state}}")],
            is_stacked=True,
        ),
        Panel(
            title="Taken over",
            description="Entries whose reader went away before the claim, and expired leases put "
            "back: a worker died or hung. What is restored had been lost by Redis: a stream was "
            "trimmed, or a key was evicted.",
            unit="cps",
            targets=[
                Target(rate("quire_messages_redelivered_total", "", WORKERS), "redelivered"),
                Target(rate("quire_leases_reaped_total", "", WORKERS), "leases reaped"),
                Target(
                    rate("quire_requests_restored_total", "lost", WORKERS), "restored: {{lost}}"
                ),
            ],
        ),
        Panel(
            title="Resumed",
            description="Requests continued from their published tokens, by whether this engine is "
            "like the one that began them.",
            unit="reqps",
            targets=[
                Target(rate("quire_requests_resumed_total", "fingerprint"), "{{fingerprint}}"),
            ],
        ),
        Panel(
            title="Dead letters",
            description="Messages nobody can read, put aside with their bytes, by reason.",
            unit="cps",
            targets=[
                Target(rate("quire_messages_dead_lettered_total", "reason", WORKERS), "{{reason}}"),
            ],
        ),
    ],
)
