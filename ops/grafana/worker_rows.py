"""The workers: state and resources, KV cache, preemptions, and commits to Redis."""

from ops.grafana.panel import Panel, Row, Target
from ops.grafana.queries import (
    MODELS,
    TOKENS_PER_SECOND,
    WORKERS,
    mean,
    quantile,
    quantiles,
    rate,
    selector,
    total,
)

FINISHED = "quire_requests_finished_total"
#: `released` and `lost` end a claim, not a request.
ENDED = f'{MODELS}, outcome!~"released|lost"'
ERROR_RATIO = f"{rate(FINISHED, outcome='error')} / {rate(FINISHED, where=ENDED)}"
#: A state timeline maps numbers to texts: number, text, colour.
STATE_NUMBERS = (
    (1, "loading", "blue"),
    (2, "ready", "green"),
    (3, "draining", "orange"),
    (4, "failed", "red"),
)
STATES = " + ".join(
    f"{number} * {total('quire_engine_state', 'instance', state=state)}"
    for number, state, _ in STATE_NUMBERS
)
#: Seconds without a step while there is work; 0 for an idle worker.
STALLED = (
    f"(time() - {selector('quire_engine_last_step_timestamp_seconds')})"
    f" * on (job, instance, model) ({total('quire_engine_requests', 'job, instance, model')}"
    " > bool 0)"
)

WORKER_ROW = Row(
    "Workers",
    [
        Panel(
            title="Workers ready",
            description="Workers that are loaded and not draining.",
            unit="short",
            targets=[Target(total("quire_engine_state", state="ready"))],
            kind="stat",
            width=4,
            height=4,
            thresholds=((None, "red"), (1, "green")),
        ),
        Panel(
            title="Error ratio",
            description="Share of ended requests that failed because of an error of the system. "
            "Rejected and cancelled ones are caused by the caller and do not count.",
            unit="percentunit",
            targets=[Target(f"{ERROR_RATIO} or vector(0)")],
            kind="stat",
            width=4,
            height=4,
            thresholds=((None, "green"), (0.01, "orange"), (0.05, "red")),
        ),
        Panel(
            title="Generating",
            description="Tokens generated per second by all selected workers.",
            unit=TOKENS_PER_SECOND,
            targets=[Target(rate("quire_generation_tokens_total"))],
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            title="State",
            description="The state of each worker: loading, ready, draining, failed.",
            unit="none",
            targets=[Target(STATES, "{{instance}}")],
            kind="state-timeline",
            width=12,
            height=4,
            mappings=STATE_NUMBERS,
        ),
        Panel(
            title="Time since the last step, while there is work",
            description="Grows when the device hangs. Zero for an idle worker. After two minutes "
            "EngineStalled fires; after stall_timeout_seconds the worker stops renewing its "
            "leases.",
            unit="s",
            targets=[Target(STALLED, "{{instance}}")],
        ),
        Panel(
            title="Engine faults",
            description="Steps that failed with an error and were repeated request by request, and "
            "broken invariants of the engine. The second must stay 0.",
            unit="cps",
            targets=[
                Target(rate("quire_engine_failed_steps_total", "instance"), "failed {{instance}}"),
                Target(rate("quire_engine_violations_total", "instance"), "broken {{instance}}"),
            ],
        ),
        Panel(
            title="Processor",
            description="Cores that each worker process uses, and threads that compute a step.",
            unit="short",
            targets=[
                Target(rate("process_cpu_seconds_total", "instance", WORKERS), "{{instance}}"),
                Target(total("quire_engine_threads", "instance", WORKERS), "threads {{instance}}"),
            ],
        ),
        Panel(
            title="Host memory",
            description="Resident memory of each worker process.",
            unit="bytes",
            targets=[
                Target(total("process_resident_memory_bytes", "instance", WORKERS), "{{instance}}"),
            ],
        ),
        Panel(
            title="Switches of models",
            description="Switches per second to each model by workers of several models, the share "
            "of their time that switches take, and the models in their memory.",
            unit="short",
            targets=[
                Target(rate("quire_worker_model_switches_total", "model"), "to {{model}}"),
                Target(
                    rate("quire_worker_model_switch_seconds_sum", "instance", WORKERS),
                    "share {{instance}}",
                ),
                Target(
                    total("quire_worker_models_loaded", "instance", WORKERS),
                    "loaded {{instance}}",
                ),
            ],
        ),
        Panel(
            title="Device memory",
            description="Memory of the device by kind; 0 if it cannot be read.",
            unit="bytes",
            targets=[
                Target(
                    total("quire_device_memory_bytes", "instance, kind", WORKERS),
                    "{{kind}} {{instance}}",
                ),
            ],
        ),
        Panel(
            title="Versions",
            description="Version, torch, device and data type of each worker.",
            unit="short",
            targets=[
                Target(
                    total("quire_build_info", "instance, version, torch, device, dtype", WORKERS)
                ),
            ],
            kind="table",
            width=4,
        ),
        Panel(
            title="Sizes",
            description="Rows per step, tokens per block, and number of blocks of each engine.",
            unit="short",
            targets=[
                Target(
                    total(
                        "quire_engine_config_info",
                        "instance, max_num_seqs, block_size, num_blocks",
                        WORKERS,
                    )
                ),
            ],
            kind="table",
            width=4,
        ),
    ],
)

KV_CACHE_ROW = Row(
    "KV cache",
    [
        Panel(
            title="Blocks",
            description="Blocks used by requests, cached for their prefixes, and free. Their sum "
            "is the pool.",
            unit="short",
            targets=[Target(total("quire_kv_cache_blocks", "state"), "{{state}}")],
            is_stacked=True,
        ),
        Panel(
            title="Usage",
            description="Blocks used by requests as a share of the pool. At 1 the next block for a "
            "request preempts another request.",
            unit="percentunit",
            targets=[
                Target(
                    f"max by (instance) ({selector('quire_kv_cache_usage_ratio')})", "{{instance}}"
                ),
            ],
            maximum=1.0,
        ),
        Panel(
            title="Prefix hits",
            description="Share of prompt tokens whose KV was found in the prefix cache.",
            unit="percentunit",
            targets=[
                Target(
                    f"{rate('quire_prompt_tokens_total', source='cached')} / "
                    f"{rate('quire_prompt_tokens_total')}",
                    "hits",
                ),
            ],
            maximum=1.0,
        ),
        Panel(
            title="Promised blocks",
            description="Cached and free blocks that are reserved for the prompts of admitted "
            "requests. Admission can use the others.",
            unit="short",
            targets=[
                Target(total("quire_kv_cache_promised_blocks", "instance"), "{{instance}}"),
            ],
        ),
        Panel(
            title="Host blocks",
            description="Blocks in host memory for requests preempted by swap, and the requests "
            "that are there.",
            unit="short",
            targets=[
                Target(total("quire_kv_cache_host_blocks", "state"), "{{state}}"),
                Target(total("quire_kv_cache_swapped_requests"), "requests"),
            ],
        ),
        Panel(
            title="KV cache memory",
            description="Memory of all blocks on the device and on the host, and of one block.",
            unit="bytes",
            targets=[
                Target(total("quire_kv_cache_bytes", "instance, of"), "{{of}} {{instance}}"),
            ],
        ),
    ],
)

UTILIZATION_ROW = Row(
    "Utilization",
    [
        Panel(
            title="Slot usage",
            description="Running requests as a share of max_num_seqs. At 1 requests wait for a "
            "slot.",
            unit="percentunit",
            targets=[
                Target(
                    f"max by (instance) ({selector('quire_engine_slot_usage_ratio')})",
                    "{{instance}}",
                ),
            ],
            maximum=1.0,
        ),
        Panel(
            title="Batch usage",
            description="Tokens of the last step as a share of max_num_batched_tokens.",
            unit="percentunit",
            targets=[
                Target(
                    f"max by (instance) ({selector('quire_engine_batch_usage_ratio')})",
                    "{{instance}}",
                ),
            ],
            maximum=1.0,
        ),
        Panel(
            title="Kinds of tokens per step",
            description="Mean tokens of a step by what they are: prompts, requests that decode, "
            "and drafts.",
            unit="short",
            targets=[
                Target(
                    f"{rate('quire_engine_computed_tokens_total', 'kind')} / ignoring (kind) "
                    f"group_left () {rate('quire_engine_steps_total')}",
                    "{{kind}}",
                ),
            ],
            is_stacked=True,
        ),
    ],
)

PREEMPTIONS_ROW = Row(
    "Preemptions",
    [
        Panel(
            title="Preemptions",
            description="Preempted requests per second, by whether their KV is recomputed or was "
            "swapped.",
            unit="cps",
            targets=[Target(rate("quire_preemptions_total", "mode"), "{{mode}}")],
            is_stacked=True,
            width=12,
        ),
        Panel(
            title="Recomputed tokens",
            description="Tokens whose KV was dropped by preemptions, per generated token. Above "
            "0.2 PreemptionThrash fires.",
            unit="percentunit",
            targets=[
                Target(
                    f"{rate('quire_preempted_tokens_total')} / "
                    f"{rate('quire_generation_tokens_total')}",
                    "recomputed",
                ),
            ],
            width=12,
        ),
    ],
)

PUBLISH_ROW = Row(
    "Publish",
    [
        Panel(
            title="Commit time",
            description="Time of one commit to Redis, from the first try to the reply.",
            unit="s",
            targets=quantiles("quire_publish_seconds", WORKERS),
        ),
        Panel(
            title="Requests per commit",
            description="Number of requests in one commit. Grows when Redis is slow, because then "
            "tokens accumulate.",
            unit="short",
            targets=[
                Target(mean("quire_publish_entries", WORKERS), "mean"),
                Target(quantile(0.95, "quire_publish_entries", "", WORKERS), "p95"),
            ],
        ),
        Panel(
            title="Backlog",
            description="Tokens generated but not committed yet.",
            unit="short",
            targets=[
                Target(total("quire_publish_backlog_tokens", "instance", WORKERS), "{{instance}}"),
            ],
        ),
        Panel(
            title="Redis errors",
            description="Failed calls to Redis, by operation and kind. They are repeated.",
            unit="cps",
            targets=[
                Target(rate("quire_redis_errors_total", "op, kind", WORKERS), "{{op}} {{kind}}"),
            ],
            width=12,
        ),
        Panel(
            title="Rewinds",
            description="Commits that found a log shorter than expected: Redis had lost its tail, "
            "and the worker wrote it again. Fenced ones were refused, because the worker had lost "
            "the claim.",
            unit="cps",
            targets=[
                Target(rate("quire_publish_rewinds_total", "instance", WORKERS), "{{instance}}"),
                Target(
                    rate("quire_publish_fenced_total", "instance", WORKERS), "fenced {{instance}}"
                ),
            ],
            width=12,
        ),
    ],
)
