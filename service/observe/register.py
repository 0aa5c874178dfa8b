"""The register: every metric of the worker. Knows no metrics library.

Those of the exporter and of the gateway are in `exporter_register` and `gateway.register`.
`metrics_page` makes docs/reference/metrics.md of all three, dashboards and alerts are compared with
them, and neither `service.observe.metrics` nor `service.exporter` builds a metric that is not in
them. Label values are closed sets. No label ever names a request, a tenant or the text of an error:
such facts belong in the log.
"""

from collections.abc import Mapping

from service.observe.vitals import THREADS, WorkerState
from service.settings.families import (
    BY_PHASE,
    BY_PRIORITY,
    DEAD_REASONS,
    ERROR_KINDS,
    FILL,
    FIRST_TOKEN,
    LONG,
    LOST,
    MODEL,
    NONE,
    OPERATIONS,
    OUTCOMES,
    QUEUE,
    SHORT,
    SIZES,
    Family,
)

#: The register. docs/reference/metrics.md is this table.
REGISTER: Mapping[str, tuple[Family, ...]] = {
    "Requests": (
        Family(
            "counter",
            "quire_requests_received_total",
            {**MODEL, **QUEUE, **BY_PRIORITY},
            "Requests claimed by this worker.",
        ),
        Family(
            "counter",
            "quire_requests_finished_total",
            {**MODEL, "outcome": OUTCOMES},
            "Claims that ended: terminal records written, requests released at drain, claims lost. "
            "deadline: those as well that this worker ended because they were late in the queue.",
        ),
        Family(
            "counter",
            "quire_requests_resumed_total",
            {**MODEL, "fingerprint": ("same", "changed")},
            "Requests taken over with published tokens, by whether the fingerprint is the same.",
        ),
        Family(
            "histogram",
            "quire_request_stream_wait_seconds",
            {**QUEUE, **BY_PRIORITY},
            "From entering the ingress stream to the claim, on wall clocks; never below 0.",
            LONG,
        ),
        Family(
            "histogram",
            "quire_request_queue_seconds",
            MODEL,
            "From the claim to the first step that computes the request.",
            LONG,
        ),
        Family(
            "histogram",
            "quire_time_to_first_token_seconds",
            MODEL,
            "From the claim to the commit of the claim's first token.",
            FIRST_TOKEN,
        ),
        Family(
            "histogram",
            "quire_inter_token_latency_seconds",
            MODEL,
            "Between two tokens of one request as they leave the engine.",
            SHORT,
        ),
        Family(
            "histogram",
            "quire_request_prefill_seconds",
            MODEL,
            "From the request's first step to its first token.",
            LONG,
        ),
        Family(
            "histogram",
            "quire_request_decode_seconds",
            MODEL,
            "From the first token to the end.",
            LONG,
        ),
        Family(
            "histogram",
            "quire_request_e2e_seconds",
            {**MODEL, **BY_PRIORITY},
            "From entering the ingress stream to the commit of the terminal record.",
            LONG,
        ),
        Family(
            "histogram",
            "quire_request_prompt_tokens",
            MODEL,
            "Prompt length of finished requests.",
            SIZES,
        ),
        Family(
            "histogram",
            "quire_request_generation_tokens",
            MODEL,
            "Output length of finished requests, tokens of earlier claims included.",
            SIZES,
        ),
    ),
    "Engine": (
        Family(
            "counter",
            "quire_prompt_tokens_total",
            {**MODEL, "source": ("computed", "cached")},
            "Prompt tokens of admitted requests: to be computed, or found in the prefix cache.",
        ),
        Family("counter", "quire_generation_tokens_total", MODEL, "Tokens generated."),
        Family(
            "counter",
            "quire_draft_tokens_total",
            {**MODEL, "outcome": ("accepted", "rejected")},
            "Draft tokens that a step has verified, by outcome.",
        ),
        Family(
            "gauge",
            "quire_engine_requests",
            {**MODEL, "state": ("running", "waiting", "preempted")},
            "Requests in the engine.",
        ),
        Family("counter", "quire_engine_steps_total", BY_PHASE, "Steps that computed something."),
        Family(
            "histogram",
            "quire_engine_step_seconds",
            BY_PHASE,
            "Time the device took for one step.",
            SHORT,
        ),
        Family("histogram", "quire_engine_step_tokens", MODEL, "Tokens of one step.", FILL),
        Family(
            "counter",
            "quire_engine_failed_steps_total",
            MODEL,
            "Steps that raised. One that was planned ahead is planned again, any other is repeated "
            "request by request.",
        ),
        Family(
            "gauge",
            "quire_engine_last_step_timestamp_seconds",
            MODEL,
            "Unix time of the last step; 0 before the first.",
        ),
        Family(
            "gauge",
            "quire_engine_state",
            {**MODEL, "state": tuple(WorkerState)},
            "1 for the state the worker is in, 0 for the others.",
        ),
        Family(
            "counter",
            "quire_engine_violations_total",
            MODEL,
            "Broken invariants found by the check of the idle engine. Must stay 0.",
        ),
        Family(
            "counter",
            "quire_preemptions_total",
            {**MODEL, "mode": ("recompute", "swap")},
            "Running requests that were preempted, by what became of their KV.",
        ),
        Family(
            "counter",
            "quire_preempted_tokens_total",
            MODEL,
            "Tokens whose KV was discarded and has to be computed again.",
        ),
        Family(
            "gauge",
            "quire_kv_cache_blocks",
            {**MODEL, "state": ("used", "cached", "free")},
            "Blocks used by requests, cached for reuse, and free; they add up to the pool.",
        ),
        Family("gauge", "quire_kv_cache_usage_ratio", MODEL, "Used blocks as a share of the pool."),
        Family(
            "gauge",
            "quire_device_memory_bytes",
            {"device": (), "kind": ("allocated", "reserved", "total")},
            "Memory of the device; 0 where the device does not tell.",
        ),
        Family(
            "gauge",
            "quire_engine_threads",
            MODEL,
            "Threads that compute a step on a CPU: fewer while others use the cores; 0 on a GPU.",
        ),
    ),
    "Publishing": (
        Family(
            "histogram", "quire_publish_seconds", NONE, "One commit, first try to reply.", SHORT
        ),
        Family("histogram", "quire_publish_entries", NONE, "Requests of one commit.", FILL),
        Family(
            "gauge",
            "quire_publish_backlog_tokens",
            NONE,
            "Tokens generated and not committed yet.",
        ),
        Family(
            "counter",
            "quire_publish_rewinds_total",
            NONE,
            "Commits that met a log shorter than what was published: Redis had lost its tail.",
        ),
        Family(
            "counter",
            "quire_publish_fenced_total",
            NONE,
            "Items of commits refused because the claim was lost to another worker.",
        ),
        Family(
            "counter",
            "quire_redis_errors_total",
            {"op": OPERATIONS, "kind": ERROR_KINDS},
            "Calls to Redis that failed. Nothing is lost by one: idempotent calls are repeated.",
        ),
    ),
    "Queue": (
        Family(
            "counter",
            "quire_messages_redelivered_total",
            QUEUE,
            "Ingress entries picked up after their first reader went away before the claim.",
        ),
        Family(
            "counter",
            "quire_leases_reaped_total",
            QUEUE,
            "Expired leases of any worker that this one put back into the queue or ended.",
        ),
        Family(
            "counter",
            "quire_requests_restored_total",
            {**QUEUE, "lost": LOST},
            "Open requests to which this worker gave back what Redis had lost of the queue around "
            "them: an entry in a stream, or a time in a set; record: only the counts were left.",
        ),
        Family(
            "counter",
            "quire_messages_dead_lettered_total",
            {**QUEUE, "reason": DEAD_REASONS},
            "Messages this worker could not read and put aside with their bytes.",
        ),
    ),
    "Worker": (
        Family(
            "gauge",
            "quire_build_info",
            {"version": (), "torch": (), "device": (), "dtype": ()},
            "Always 1; the labels say what is running.",
        ),
        Family(
            "gauge",
            "quire_engine_config_info",
            {"max_num_seqs": (), "block_size": (), "num_blocks": ()},
            "Always 1; the labels are the sizes of the engine.",
        ),
        Family(
            "gauge",
            "quire_threads_overdue",
            {"thread": THREADS},
            "Threads without a sign of life. Meanwhile the worker renews no lease; later it exits.",
        ),
    ),
}


def families() -> dict[str, Family]:
    """The worker's metrics by name."""
    return {family.name: family for section in REGISTER.values() for family in section}
