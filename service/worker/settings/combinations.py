"""Rules for combinations of settings: which are refused, and which cause a warning in the log.

A worker with settings that contradict each other does not start. A setting that was set explicitly
and has no effect causes a warning. Defaults never cause one: nobody has chosen them.
"""

from collections.abc import Callable, Iterator

from engine.config import NUM_SEQS
from service.worker.settings.serving import WorkerSettings

#: The keys of a request are kept for at least this many leases. Their expiry is renewed when half
#: of it has passed. So at least half is left when a worker dies: one lease until the claim expires,
#: and one in which another worker finds the request.
KEPT_LEASES = 4
#: A step with a draft has at least this many tokens: the last known one and one guessed token.
MIN_DRAFTED_STEP_TOKENS = 2
#: Settings of the native engine alone.
NATIVE_ONLY = (
    *("attention_backend", "batch_mode", "block_size", "class_shares"),
    *("device", "dynamic_batching", "kv_cache_dtype"),
    *("max_prefill_tokens", "max_speculative_step_tokens", "model_path", "num_host_blocks"),
    *("num_speculative_tokens", "num_state_snapshots", "state_snapshot_blocks"),
    *("pooling", "preemption_mode"),
    *("quantization", "remember_checks", "shared_weights", "shared_weights_bytes", "task"),
    "watermark",
)


Rule = tuple[Callable[[WorkerSettings], bool], str]

#: The combinations that are refused: a test and the message.
_REFUSED: tuple[Rule, ...] = (
    (
        lambda s: len(set(s.served_shards)) < len(s.served_shards),
        "served_shards names a shard twice",
    ),
    (
        lambda s: s.num_blocks is not None and s.kv_cache_memory_bytes is not None,
        "set num_blocks or kv_cache_memory_bytes, not both",
    ),
    (
        lambda s: s.max_queue_seconds + s.retention_seconds < KEPT_LEASES * s.lease_seconds,
        (
            f"max_queue_seconds and retention_seconds together must be {KEPT_LEASES} times "
            "lease_seconds or more: a request could be gone before it is taken over"
        ),
    ),
    (
        lambda s: s.preemption_mode == "swap" and s.num_host_blocks == 0,
        (
            "preemption_mode 'swap' needs blocks in host memory: set num_host_blocks to 1 or "
            "more, or preemption_mode to 'recompute'"
        ),
    ),
    (
        lambda s: s.preemption_mode == "recompute" and (s.num_host_blocks or 0) > 0,
        (
            "num_host_blocks takes memory that preemption_mode 'recompute' never uses: set "
            "preemption_mode to 'auto' or 'swap', or num_host_blocks to 0"
        ),
    ),
    (
        lambda s: s.pictures and s.model_path == "fast",
        "pictures needs the model's own code: set model_path to 'auto' or 'wide'",
    ),
    (
        lambda s: s.pictures and s.task in ("embed", "classify"),
        "pictures are read by models that generate: set task to 'generate' or 'auto'",
    ),
    (
        lambda s: sum(share > 0 for share in s.class_shares) > _least_seqs(s),
        "class_shares needs a slot for each class with a share: raise max_num_seqs",
    ),
    (
        lambda s: (
            s.num_speculative_tokens > 0 and _largest_drafted_step(s) < MIN_DRAFTED_STEP_TOKENS
        ),
        (
            f"num_speculative_tokens needs steps of {MIN_DRAFTED_STEP_TOKENS} tokens or more: "
            "raise max_speculative_step_tokens and max_num_batched_tokens, or set "
            "num_speculative_tokens to 0"
        ),
    ),
)

#: Settings that belong to one model or one queue. With several models, the table has them.
ONE_MODEL_ONLY = ("adapters", "burst", "model", "served_model_name", "served_shards", "shards")

#: Settings without effect: the setting, a test, and the reason.
_UNUSED: tuple[tuple[str, Callable[[WorkerSettings], bool], str], ...] = (
    (
        "max_speculative_step_tokens",
        lambda s: s.num_speculative_tokens == 0,
        "nothing is guessed while num_speculative_tokens is 0",
    ),
    *(
        (name, lambda s: not s.pictures, "pictures are not read")
        for name in ("max_picture_pixels", "picture_decode_seconds", "picture_decode_bytes")
    ),
    *(
        (name, lambda s: not s.enable_prefix_caching, "enable_prefix_caching is off")
        for name in ("num_state_snapshots", "state_snapshot_blocks")
    ),
    (
        "state_snapshot_blocks",
        lambda s: s.num_state_snapshots == 0,
        "num_state_snapshots is 0",
    ),
    (
        "aging_seconds",
        lambda s: s.policy == "fcfs",
        "policy 'fcfs' ignores classes and sizes",
    ),
    (
        "long_prefill_token_threshold",
        lambda s: s.long_prefill_token_threshold >= (s.max_num_batched_tokens or float("inf")),
        "no step has more than max_num_batched_tokens",
    ),
    (
        "max_prefill_tokens",
        lambda s: s.max_prefill_tokens >= (s.max_num_batched_tokens or float("inf")),
        "no step has more than max_num_batched_tokens",
    ),
    (
        "async_scheduling",
        lambda s: s.async_scheduling and s.device == "cpu",
        "on a CPU no step is launched in advance",
    ),
)


def refusal(settings: WorkerSettings) -> str | None:
    """Why these settings cannot be combined; None if they can."""
    if any(shard >= settings.shards for shard in settings.served_shards):
        return f"served_shards: must be from 0 to {settings.shards - 1}"
    if settings.engine == "native" and settings.vllm:
        return "vllm has arguments, and engine is 'native': set engine to 'vllm'"
    if settings.engine == "vllm":
        unserved = [name for name in NATIVE_ONLY if name in settings.model_fields_set]
        if unserved:
            return f"engine vllm does not serve {', '.join(unserved)}"
    if settings.models_file is not None:
        if settings.engine == "vllm":
            return "models_file: engine vllm serves one model"
        given = [name for name in ONE_MODEL_ONLY if name in settings.model_fields_set]
        if given:
            return f"{', '.join(given)}: cannot be combined with models_file, whose entries say it"
    return next((reason for is_wrong, reason in _REFUSED if is_wrong(settings)), None)


def without_effect(settings: WorkerSettings) -> Iterator[str]:
    """A clause for each setting that was set explicitly and has no or less effect."""
    for name, is_unused, reason in _UNUSED:
        if name in settings.model_fields_set and is_unused(settings):
            yield f"{name} has no effect: {reason}"
    budget = settings.max_num_batched_tokens
    if budget is not None and budget < _least_seqs(settings):
        yield (
            f"at most {budget} requests run at once, fewer than max_num_seqs: each needs a token "
            "of max_num_batched_tokens in every step"
        )


def _least_seqs(settings: WorkerSettings) -> int:
    """Requests that run at once, whatever the device is."""
    return settings.max_num_seqs or min(NUM_SEQS.values())


def _largest_drafted_step(settings: WorkerSettings) -> int:
    budget = settings.max_num_batched_tokens
    drafted = settings.max_speculative_step_tokens
    return drafted if budget is None else min(drafted, budget)
