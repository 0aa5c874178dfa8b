"""Settings that only make sense together: which are refused, and which a log line warns of.

A worker that was asked for something that it cannot do does not start. A setting that was given and
changes nothing is told in the log. Defaults are never warned of: nobody asked for them.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

#: For how many leases the keys of a request are kept at least. They are renewed once half of that
#: is over. So the half is left when a worker dies: its lease, and one more in which others look.
KEPT_LEASES = 4
#: A step with a draft has at least this many tokens: the last known one, and one that is guessed.
MIN_DRAFTED_STEP_TOKENS = 2


class Combined(Protocol):
    """What is read of the settings here; config.py has their meaning."""

    shards: int
    served_shards: tuple[int, ...]
    lease_seconds: float
    max_queue_seconds: float
    retention_seconds: float
    num_blocks: int | None
    kv_cache_memory_bytes: int | None
    num_host_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int | None
    long_prefill_token_threshold: int
    num_speculative_tokens: int
    max_speculative_step_tokens: int
    async_scheduling: bool

    @property
    def device(self) -> str: ...

    @property
    def policy(self) -> str: ...

    @property
    def preemption_mode(self) -> str: ...

    @property
    def model_fields_set(self) -> set[str]: ...


Rule = tuple[Callable[[Combined], bool], str]

#: What is refused: when, and what is told.
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
        lambda s: s.preemption_mode == "recompute" and s.num_host_blocks > 0,
        (
            "num_host_blocks takes memory that preemption_mode 'recompute' never uses: set "
            "preemption_mode to 'auto' or 'swap', or num_host_blocks to 0"
        ),
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

#: What has no effect: the setting, when, and why.
_IDLE: tuple[tuple[str, Callable[[Combined], bool], str], ...] = (
    (
        "swap_min_tokens",
        lambda s: s.preemption_mode != "auto",
        "it is for preemption_mode 'auto'",
    ),
    (
        "swap_min_tokens",
        lambda s: s.preemption_mode == "auto" and s.num_host_blocks == 0,
        "nothing is swapped while num_host_blocks is 0",
    ),
    (
        "max_speculative_step_tokens",
        lambda s: s.num_speculative_tokens == 0,
        "nothing is guessed while num_speculative_tokens is 0",
    ),
    (
        "aging_seconds",
        lambda s: s.policy == "fcfs",
        "policy 'fcfs' knows neither classes nor sizes",
    ),
    (
        "long_prefill_token_threshold",
        lambda s: s.long_prefill_token_threshold >= (s.max_num_batched_tokens or float("inf")),
        "no step has more than max_num_batched_tokens",
    ),
    (
        "async_scheduling",
        lambda s: s.async_scheduling and s.device == "cpu",
        "on a CPU no step is launched ahead",
    ),
)


def refusal(settings: Combined) -> str | None:
    """Why these settings cannot be had together; None if they can."""
    if any(shard >= settings.shards for shard in settings.served_shards):
        return f"served_shards: the shards are 0 to {settings.shards - 1}"
    return next((reason for is_wrong, reason in _REFUSED if is_wrong(settings)), None)


def without_effect(settings: Combined) -> Iterator[str]:
    """A clause for each setting that was given and does not do what its name says."""
    for name, is_idle, reason in _IDLE:
        if name in settings.model_fields_set and is_idle(settings):
            yield f"{name} has no effect: {reason}"
    most = settings.max_num_batched_tokens
    if most is not None and most < settings.max_num_seqs:
        yield (
            f"no more than {most} requests run at once, fewer than max_num_seqs: each needs a "
            "token of max_num_batched_tokens in every step"
        )


def _largest_drafted_step(settings: Combined) -> int:
    most = settings.max_num_batched_tokens
    drafted = settings.max_speculative_step_tokens
    return drafted if most is None else min(drafted, most)
