"""Requests that wait in Redis, and how workers claim them. The first panels are from the exporter.

They use the largest value of all exporters and not the sum: while an exporter is replaced there are
two of them, which export the same numbers.
"""

from ops.grafana.panel import Panel, Row, Target
from ops.grafana.queries import (
    MODELS,
    QUEUES,
    TOKENS_PER_SECOND,
    WORKERS,
    largest,
    quantile,
    rate,
    total,
)

#: How long the workers need for the backlog at the rate of the last minutes.
DRAIN_SECONDS = (
    f"sum by (queue) ({largest('quire_queue_lag_messages', 'queue, priority', QUEUES)}) / "
    f"{rate('quire_requests_received_total', 'queue', f'{MODELS}, {QUEUES}')}"
)

QUEUE_ROW = Row(
    "Queue",
    [
        Panel(
            title="Queue backlog",
            description="Entries in the streams of the queue, by priority: one for each request "
            "that waits for a worker.",
            unit="short",
            targets=[
                Target(
                    largest("quire_queue_lag_messages", "queue, priority", QUEUES),
                    "{{queue}} {{priority}}",
                ),
            ],
            is_stacked=True,
        ),
        Panel(
            title="Waiting tokens",
            description="Tokens of the requests that wait: those of the prompts, and the most of "
            "the answers. Workers can be scaled by this number.",
            unit="short",
            targets=[
                Target(largest("quire_queue_waiting_tokens", "queue", QUEUES), "{{queue}}"),
            ],
        ),
        Panel(
            title="Oldest request",
            description="How long the oldest request has waited for a worker, by priority. Unlike "
            "the wait of claimed requests, this time grows while nothing is claimed.",
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
            ],
        ),
        Panel(
            title="Time to drain",
            description="How long the workers need for the backlog at the current rate of claims. "
            "Infinite without claims.",
            unit="s",
            targets=[Target(DRAIN_SECONDS, "{{queue}}")],
        ),
        Panel(
            title="Scheduled",
            description="Requests that are queued at a later time, including those that pause "
            "between two attempts. Workers queue due ones within seconds.",
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
            description="Running requests. An expired lease belongs to a worker that has died or "
            "hangs; other workers take the request over within seconds.",
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
            description="Workers that have recently registered as ready for the queue.",
            unit="short",
            targets=[Target(largest("quire_queue_consumers", "queue", QUEUES), "{{queue}}")],
            kind="stat",
            width=4,
            thresholds=((None, "red"), (1, "green")),
        ),
        Panel(
            title="Dead letters kept",
            description="Messages that were unreadable, or whose attempts have all failed. They "
            "wait for an operator.",
            unit="short",
            targets=[Target(largest("quire_dead_letter_messages", "queue", QUEUES), "{{queue}}")],
            kind="stat",
            width=4,
            thresholds=((None, "green"), (1, "orange")),
        ),
        Panel(
            title="Tenants",
            description="Tenants with open requests, and those that have used up their tokens per "
            "minute.",
            unit="short",
            targets=[
                Target(
                    largest("quire_queue_tenants", "queue, state", QUEUES), "{{queue}} {{state}}"
                ),
                Target(
                    largest("quire_queue_shared_by_tokens", "queue", QUEUES),
                    "{{queue}}, take turns by tokens",
                ),
            ],
        ),
        Panel(
            title="Tenant furthest ahead",
            description="Tokens that the tenant with the most has waiting, divided by its weight, "
            "by priority. Other tenants take turns with it while fairness by tokens is set.",
            unit="short",
            targets=[
                Target(
                    largest("quire_queue_tenant_ahead_tokens", "queue, priority", QUEUES),
                    "{{queue}} {{priority}}",
                ),
            ],
        ),
        Panel(
            title="Memory of Redis",
            description="Memory that Redis uses, and its maxmemory; 0 means no limit. Queued "
            "requests store prompts, finished ones store outputs for the retention. A full Redis "
            "refuses writes.",
            unit="bytes",
            targets=[
                Target("max by (job, kind) (quire_redis_memory_bytes)", "{{job}} {{kind}}"),
            ],
        ),
        Panel(
            title="Claimed requests",
            description="Requests claimed per second, by priority.",
            unit="reqps",
            targets=[Target(rate("quire_requests_received_total", "priority"), "{{priority}}")],
            is_stacked=True,
        ),
        Panel(
            title="Wait in the queue, p95",
            description="From the entry in the ingress stream to the claim, by priority. Does not "
            "include requests that are not claimed yet: see the oldest request.",
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
            description="Running requests, those that wait for their first step, and preempted "
            "ones. A worker claims only what it can soon run, so the backlog stays in Redis.",
            unit="short",
            targets=[Target(total("quire_engine_requests", "state"), "{{state}}")],
            is_stacked=True,
        ),
        Panel(
            title="Taken over",
            description="Requests with an expired lease: a worker died or hangs. For restored "
            "requests Redis had lost keys, because a key was deleted or evicted.",
            unit="cps",
            targets=[
                Target(rate("quire_leases_reaped_total", "", WORKERS), "leases reaped"),
                Target(
                    rate("quire_requests_restored_total", "lost", WORKERS), "restored: {{lost}}"
                ),
            ],
        ),
        Panel(
            title="Resumed",
            description="Requests continued after their published tokens. changed: another engine "
            "generated those.",
            unit="reqps",
            targets=[
                Target(rate("quire_requests_resumed_total", "fingerprint"), "{{fingerprint}}"),
            ],
        ),
        Panel(
            title="Used tokens by tenant",
            description="Tokens of ended requests per second: prompt and output, the ten tenants "
            "with the most. (other): those beyond the first hundred of the exporter.",
            unit=TOKENS_PER_SECOND,
            targets=[
                Target(
                    "topk(10, "
                    + rate("quire_queue_tenant_tokens_total", "tenant", QUEUES, kind=kind)
                    + ")",
                    f"{kind}: {{{{tenant}}}}",
                )
                for kind in ("prompt", "output")
            ],
        ),
        Panel(
            title="Ended requests by tenant",
            description="Ended requests per second, the ten tenants with the most.",
            unit="reqps",
            targets=[
                Target(
                    f"topk(10, {rate('quire_queue_tenant_requests_total', 'tenant', QUEUES)})",
                    "{{tenant}}",
                )
            ],
        ),
        Panel(
            title="Dead letters",
            description="Messages that workers could not read and have stored, by reason.",
            unit="cps",
            targets=[
                Target(rate("quire_messages_dead_lettered_total", "reason", WORKERS), "{{reason}}"),
            ],
        ),
    ],
)
