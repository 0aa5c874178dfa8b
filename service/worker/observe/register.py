"""The register: the definitions of all metrics of the worker. Knows no metrics library.

`service.exporter.register` and `service.gateway.register` define those of the exporter and the
gateway. docs/reference/metrics.md is generated from all three, and tests compare dashboards and
alerts with them. Every exported metric is defined in one of them. Label values are closed sets. No
label contains the id of a request, a tenant or the text of an error; those are in the log.
"""

from collections.abc import Mapping

from service.shared.families import (
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
    MetricFamily,
)
from service.worker.observe.vitals import THREADS, WorkerState

#: The register. docs/reference/metrics.md is this table.
REGISTER: Mapping[str, tuple[MetricFamily, ...]] = {
    "Requests": (
        MetricFamily(
            "counter",
            "quire_requests_received_total",
            {**MODEL, **QUEUE, **BY_PRIORITY},
            "Requests claimed by this worker.",
        ),
        MetricFamily(
            "counter",
            "quire_requests_finished_total",
            {**MODEL, "outcome": OUTCOMES},
            "Claims that ended: with a terminal record, released at a drain, or lost. deadline "
            "also counts requests that this worker ended because they expired in the queue.",
        ),
        MetricFamily(
            "counter",
            "quire_requests_targeted_total",
            {**MODEL, "latency": ("met", "missed")},
            "Requests with a target latency that this worker completed within it (met), or after "
            "it, or that failed or passed their deadline here (missed). Without cancelled ones.",
        ),
        MetricFamily(
            "counter",
            "quire_requests_resumed_total",
            {**MODEL, "fingerprint": ("same", "changed")},
            "Requests taken over with published tokens. changed: another engine generated them.",
        ),
        MetricFamily(
            "histogram",
            "quire_request_stream_wait_seconds",
            {**QUEUE, **BY_PRIORITY},
            "From the arrival in the queue to the first claim, by wall clocks; never below 0.",
            LONG,
        ),
        MetricFamily(
            "histogram",
            "quire_request_queue_seconds",
            MODEL,
            "From the claim to the first step that computes the request.",
            LONG,
        ),
        MetricFamily(
            "histogram",
            "quire_time_to_first_token_seconds",
            MODEL,
            "From the claim to the commit of the claim's first token.",
            FIRST_TOKEN,
        ),
        MetricFamily(
            "histogram",
            "quire_inter_token_latency_seconds",
            MODEL,
            "Between two tokens of one request, when they leave the engine.",
            SHORT,
        ),
        MetricFamily(
            "histogram",
            "quire_request_prefill_seconds",
            MODEL,
            "From the request's first step to its first token.",
            LONG,
        ),
        MetricFamily(
            "histogram",
            "quire_request_decode_seconds",
            MODEL,
            "From the first token to the end.",
            LONG,
        ),
        MetricFamily(
            "histogram",
            "quire_request_e2e_seconds",
            {**MODEL, **BY_PRIORITY},
            "From the entry in the ingress stream to the commit of the terminal record.",
            LONG,
        ),
        MetricFamily(
            "histogram",
            "quire_request_prompt_tokens",
            MODEL,
            "Prompt length of finished requests.",
            SIZES,
        ),
        MetricFamily(
            "histogram",
            "quire_request_generation_tokens",
            MODEL,
            "Output length of finished requests, including tokens of earlier claims.",
            SIZES,
        ),
    ),
    "Engine": (
        MetricFamily(
            "counter",
            "quire_prompt_tokens_total",
            {**MODEL, "source": ("computed", "cached")},
            "Prompt tokens of admitted requests: to be computed, or found in the prefix cache.",
        ),
        MetricFamily("counter", "quire_generation_tokens_total", MODEL, "Tokens generated."),
        MetricFamily(
            "counter",
            "quire_published_tokens_total",
            {**MODEL, **BY_PRIORITY},
            "Tokens published, by the class of their request.",
        ),
        MetricFamily(
            "counter",
            "quire_tenant_tokens_total",
            {**MODEL, "tenant": ()},
            "Tokens published, by tenant: the first hundred of this worker, and (other). A tenant "
            "appears with its first token.",
        ),
        MetricFamily(
            "counter",
            "quire_draft_tokens_total",
            {**MODEL, "outcome": ("accepted", "rejected")},
            "Draft tokens that a step has checked, by outcome.",
        ),
        MetricFamily(
            "gauge",
            "quire_engine_requests",
            {**MODEL, "state": ("running", "waiting", "preempted")},
            "Requests in the engine.",
        ),
        MetricFamily(
            "counter", "quire_engine_steps_total", BY_PHASE, "Steps that computed something."
        ),
        MetricFamily(
            "histogram",
            "quire_engine_step_seconds",
            BY_PHASE,
            "Time the device took for one step.",
            SHORT,
        ),
        MetricFamily("histogram", "quire_engine_step_tokens", MODEL, "Tokens of one step.", FILL),
        MetricFamily(
            "counter",
            "quire_engine_computed_tokens_total",
            {**MODEL, "kind": ("prefill", "decode", "draft")},
            "Tokens of all steps: of prompts, of requests that decode, and drafted ones.",
        ),
        MetricFamily(
            "gauge",
            "quire_engine_batch_usage_ratio",
            MODEL,
            "Tokens of the last step as a share of max_num_batched_tokens; 0 when idle.",
        ),
        MetricFamily(
            "gauge",
            "quire_engine_slot_usage_ratio",
            MODEL,
            "Running requests as a share of max_num_seqs.",
        ),
        MetricFamily(
            "counter",
            "quire_engine_failed_steps_total",
            MODEL,
            "Steps that failed with an error. A step that was planned in advance is planned again; "
            "any other is repeated request by request.",
        ),
        MetricFamily(
            "gauge",
            "quire_engine_last_step_timestamp_seconds",
            MODEL,
            "Unix time of the last step; 0 before the first.",
        ),
        MetricFamily(
            "gauge",
            "quire_engine_state",
            {**MODEL, "state": tuple(WorkerState)},
            "1 for the current state of the worker, 0 for the others.",
        ),
        MetricFamily(
            "counter",
            "quire_engine_violations_total",
            MODEL,
            "Broken invariants that the check of the idle engine has found. Must stay 0.",
        ),
        MetricFamily(
            "counter",
            "quire_preemptions_total",
            {**MODEL, "mode": ("recompute", "swap")},
            "Preempted requests, by whether their KV is recomputed or was swapped.",
        ),
        MetricFamily(
            "counter",
            "quire_preempted_tokens_total",
            MODEL,
            "Tokens whose KV was dropped and has to be recomputed.",
        ),
        MetricFamily(
            "gauge",
            "quire_kv_cache_blocks",
            {**MODEL, "state": ("used", "cached", "free")},
            "Blocks used by requests, cached for reuse, and free; their sum is the pool.",
        ),
        MetricFamily(
            "gauge", "quire_kv_cache_usage_ratio", MODEL, "Used blocks as a share of the pool."
        ),
        MetricFamily(
            "gauge",
            "quire_kv_cache_promised_blocks",
            MODEL,
            "Cached and free blocks that are reserved for the prompts of admitted requests.",
        ),
        MetricFamily(
            "gauge",
            "quire_kv_cache_host_blocks",
            {**MODEL, "state": ("used", "free")},
            "Blocks in host memory for requests preempted by swap.",
        ),
        MetricFamily(
            "gauge",
            "quire_kv_cache_swapped_requests",
            MODEL,
            "Preempted requests whose KV is in host memory.",
        ),
        MetricFamily(
            "gauge",
            "quire_kv_cache_bytes",
            {**MODEL, "of": ("block", "device", "host")},
            "Memory of one block, of all blocks on the device, and of all blocks on the host.",
        ),
        MetricFamily(
            "gauge",
            "quire_device_memory_bytes",
            {"device": (), "kind": ("allocated", "reserved", "total")},
            "Memory of the device; 0 if it cannot be read.",
        ),
        MetricFamily(
            "gauge",
            "quire_engine_threads",
            MODEL,
            "Threads that compute a step on a CPU: fewer while other processes use the cores; 0 on "
            "a GPU.",
        ),
    ),
    "Publishing": (
        MetricFamily(
            "histogram",
            "quire_publish_seconds",
            NONE,
            "Time of one commit, from the first try to the reply.",
            SHORT,
        ),
        MetricFamily("histogram", "quire_publish_entries", NONE, "Requests in one commit.", FILL),
        MetricFamily(
            "gauge",
            "quire_publish_backlog_tokens",
            NONE,
            "Tokens generated but not committed yet.",
        ),
        MetricFamily(
            "counter",
            "quire_publish_rewinds_total",
            NONE,
            "Commits that found a log shorter than expected, because Redis had lost its tail.",
        ),
        MetricFamily(
            "counter",
            "quire_publish_fenced_total",
            NONE,
            "Items of commits that were refused because the worker had lost the claim.",
        ),
        MetricFamily(
            "counter",
            "quire_redis_errors_total",
            {"op": OPERATIONS, "kind": ERROR_KINDS},
            "Failed calls to Redis. Nothing is lost: the calls are idempotent and are repeated.",
        ),
    ),
    "Queue": (
        MetricFamily(
            "counter",
            "quire_leases_reaped_total",
            QUEUE,
            "Expired leases of any worker whose requests this one has queued again or ended.",
        ),
        MetricFamily(
            "counter",
            "quire_requests_restored_total",
            {**QUEUE, "lost": LOST},
            "Open requests for which this worker has restored what Redis had lost: an entry in a "
            "rank set, or a time in a set. record: the request itself was lost and is counted no "
            "longer.",
        ),
        MetricFamily(
            "counter",
            "quire_messages_dead_lettered_total",
            {**QUEUE, "reason": DEAD_REASONS},
            "Messages that this worker could not read and has stored as dead letters.",
        ),
    ),
    "Worker": (
        MetricFamily(
            "gauge",
            "quire_build_info",
            {"version": (), "torch": (), "device": (), "dtype": ()},
            "Always 1; the labels are the versions and the device.",
        ),
        MetricFamily(
            "gauge",
            "quire_engine_config_info",
            {"max_num_seqs": (), "block_size": (), "num_blocks": ()},
            "Always 1; the labels are the sizes of the engine.",
        ),
        MetricFamily(
            "counter",
            "quire_worker_model_switches_total",
            {**MODEL, "source": ("kept", "loaded")},
            "Switches of a worker of several models to this one: it was still in memory (`kept`), "
            "or was loaded. The first load does not count.",
        ),
        MetricFamily(
            "histogram",
            "quire_worker_model_switch_seconds",
            {"source": ("kept", "loaded")},
            "Time of a switch, from the decision to the first claim: releasing the requests of "
            "the model before, and loading the next one.",
            LONG,
        ),
        MetricFamily(
            "gauge",
            "quire_worker_models_loaded",
            NONE,
            "Models in the memory of this worker, the one that it serves included.",
        ),
        MetricFamily(
            "gauge",
            "quire_threads_overdue",
            {"thread": THREADS},
            "Threads without a sign of life for too long. While there is one, the worker renews no "
            "lease; later it exits.",
        ),
    ),
}


def families() -> dict[str, MetricFamily]:
    """The worker's metrics by name."""
    return {family.name: family for section in REGISTER.values() for family in section}
