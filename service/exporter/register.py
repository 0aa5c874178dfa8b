"""The metrics of the exporter: a part of the register, see service/worker/observe/register.py."""

from service.shared.families import BY_PRIORITY, NONE, QUEUE, MetricFamily

#: The exporter's metrics, exported once for all workers: if each worker exported them, a sum over
#: workers would count the same backlog many times.
EXPORTER_REGISTER: tuple[MetricFamily, ...] = (
    MetricFamily(
        "gauge",
        "quire_exporter_up",
        NONE,
        "1 if the queues were read from Redis in time. 0 if not; then it is the only metric.",
    ),
    MetricFamily(
        "gauge",
        "quire_queue_waiting_requests",
        QUEUE,
        "Queued requests, whether a worker has read their entry or not.",
    ),
    MetricFamily(
        "gauge",
        "quire_queue_waiting_tokens",
        QUEUE,
        "Tokens of queued and scheduled requests: those of the prompt and the most of the answer, "
        "as limits of the backlog count them.",
    ),
    MetricFamily(
        "gauge",
        "quire_queue_lag_messages",
        {**QUEUE, **BY_PRIORITY},
        "Entries in the ingress stream, one for each waiting request. Entries of requests that "
        "were cancelled or expired stay until a worker consumes them.",
    ),
    MetricFamily(
        "gauge",
        "quire_queue_oldest_message_age_seconds",
        {**QUEUE, **BY_PRIORITY, "state": ("undelivered",)},
        "Age of the oldest entry, or of the request that is claimed next, whichever is more; 0 "
        "while no request is queued.",
    ),
    MetricFamily(
        "gauge",
        "quire_queue_scheduled_messages",
        {**QUEUE, "state": ("waiting", "due")},
        "Scheduled requests. due: their time has come, and no worker has queued them yet.",
    ),
    MetricFamily(
        "gauge",
        "quire_queue_paused",
        QUEUE,
        "1 while the queue is paused by an operator.",
    ),
    MetricFamily(
        "gauge",
        "quire_queue_leases",
        {**QUEUE, "state": ("live", "expired")},
        "Running requests. expired: their lease has expired, and no worker has reaped it yet.",
    ),
    MetricFamily(
        "gauge",
        "quire_queue_consumers",
        QUEUE,
        "Workers that have recently registered as ready.",
    ),
    MetricFamily(
        "gauge",
        "quire_queue_shared_by_tokens",
        QUEUE,
        "1 while the tenants of each class take turns by tokens, 0 while only the policy counts.",
    ),
    MetricFamily(
        "gauge",
        "quire_queue_tenants",
        {**QUEUE, "state": ("open", "limited")},
        "Tenants in each shard, added up. open: with requests that wait or run. limited: of their "
        "tokens per minute, less than those of a second are left.",
    ),
    MetricFamily(
        "gauge",
        "quire_queue_tenant_ahead_tokens",
        {**QUEUE, **BY_PRIORITY},
        "How far the tenant that is furthest ahead is ahead of the virtual time of its class: "
        "tokens of its requests that wait, divided by its weight. 0 unless tenants take turns.",
    ),
    MetricFamily(
        "gauge",
        "quire_queue_batches",
        {**QUEUE, "state": ("held", "free")},
        "Batches over HTTP that have not ended. free: no batcher holds them.",
    ),
    MetricFamily(
        "counter",
        "quire_queue_tenant_requests_total",
        {**QUEUE, "tenant": ()},
        "Requests that have ended since the exporter began, by tenant: the first hundred, and "
        "(other). From the ends of the queue.",
    ),
    MetricFamily(
        "counter",
        "quire_queue_tenant_tokens_total",
        {**QUEUE, "tenant": (), "kind": ("prompt", "cached", "output")},
        "Tokens of these requests. cached: those of the prompt that a worker had computed before; "
        "they count as prompt tokens, too.",
    ),
    MetricFamily(
        "gauge", "quire_dead_letter_messages", QUEUE, "Dead letters kept for an operator."
    ),
    MetricFamily(
        "gauge",
        "quire_redis_memory_bytes",
        {"kind": ("used", "limit")},
        "Memory that Redis uses, and its maxmemory, 0 for none. Missing if the exporter's user is "
        "not allowed to run INFO.",
    ),
)


def exporter_families() -> dict[str, MetricFamily]:
    """The exporter's metrics by name."""
    return {family.name: family for family in EXPORTER_REGISTER}
