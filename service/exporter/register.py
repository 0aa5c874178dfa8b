"""The metrics of the exporter; part of the register, see service/observe/register.py."""

from service.settings.families import BY_PRIORITY, NONE, QUEUE, Family

#: The exporter's metrics, exported once for all workers: if each worker exported them, a sum over
#: workers would count the same backlog many times.
EXPORTER_REGISTER: tuple[Family, ...] = (
    Family(
        "gauge",
        "quire_exporter_up",
        NONE,
        "1 if the queues could be read from Redis in time; 0 if not, and then the scrape holds "
        "nothing else.",
    ),
    Family(
        "gauge",
        "quire_queue_waiting_requests",
        QUEUE,
        "Requests that wait for a worker now, read or not.",
    ),
    Family(
        "gauge",
        "quire_queue_lag_messages",
        {**QUEUE, **BY_PRIORITY},
        "Entries in the ingress stream that no worker has read; those of requests that were "
        "cancelled, or waited too long, stay until one has.",
    ),
    Family(
        "gauge",
        "quire_queue_pending_messages",
        {**QUEUE, **BY_PRIORITY},
        "Entries that a worker has read and not claimed yet.",
    ),
    Family(
        "gauge",
        "quire_queue_oldest_message_age_seconds",
        {**QUEUE, **BY_PRIORITY, "state": ("undelivered", "pending")},
        "Age of the oldest entry; undelivered: since it entered the stream, pending: since it "
        "was read. 0 if there is none, undelivered also while no request is queued.",
    ),
    Family(
        "gauge",
        "quire_queue_scheduled_messages",
        {**QUEUE, "state": ("waiting", "due")},
        "Requests scheduled for a later time; due: that time has come, and no worker has queued "
        "them yet.",
    ),
    Family(
        "gauge",
        "quire_queue_paused",
        QUEUE,
        "1 while the queue is paused by an operator.",
    ),
    Family(
        "gauge",
        "quire_queue_leases",
        {**QUEUE, "state": ("live", "expired")},
        "Requests that run somewhere; expired: nobody renewed the lease or took them over yet.",
    ),
    Family(
        "gauge",
        "quire_queue_consumers",
        QUEUE,
        "Workers that have lately signed the registry as ready.",
    ),
    Family("gauge", "quire_dead_letter_messages", QUEUE, "Dead letters kept for a person to see."),
    Family(
        "gauge",
        "quire_redis_memory_bytes",
        {"kind": ("used", "limit")},
        "Memory of Redis and its maxmemory, 0 for none. Missing where the exporter's user may not "
        "ask (INFO).",
    ),
)


def exporter_families() -> dict[str, Family]:
    """The exporter's metrics by name."""
    return {family.name: family for family in EXPORTER_REGISTER}
