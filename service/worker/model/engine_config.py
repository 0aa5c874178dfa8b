"""The configuration of a worker's engine, from its settings and from what was loaded."""

from collections.abc import Collection

from engine.config import NUM_SEQS, EngineConfig
from service.worker.settings.config import Settings


def engine_config(
    settings: Settings,
    *,
    num_blocks: int,
    num_host_blocks: int | None = None,
    block_copy_seconds: float = 0.0,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int,
    max_model_len: int,
    vocab_size: int,
    eos_token_ids: frozenset[int],
    adapters: Collection[str] = (),
    reads_pictures: bool = False,
    block_size: int | None = None,
) -> EngineConfig:
    """The engine's settings, completed by values from the model, the memory and the device."""
    return EngineConfig(
        num_blocks=num_blocks,
        max_model_len=min(max_model_len, settings.max_model_len or max_model_len),
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        adapters=frozenset(adapters),
        reads_pictures=reads_pictures,
        block_size=block_size or settings.block_size,
        num_host_blocks=(settings.num_host_blocks or 0)
        if num_host_blocks is None
        else num_host_blocks,
        max_num_seqs=max_num_seqs or settings.max_num_seqs or NUM_SEQS["cpu"],
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        max_prefill_tokens=settings.max_prefill_tokens,
        batch_mode=settings.batch_mode,
        dynamic_batching=settings.dynamic_batching,
        num_speculative_tokens=settings.num_speculative_tokens,
        max_speculative_step_tokens=settings.max_speculative_step_tokens,
        enable_prefix_caching=settings.enable_prefix_caching,
        state_snapshot_blocks=settings.state_snapshot_blocks,
        policy=settings.policy,
        aging_seconds=settings.aging_seconds,
        class_shares=settings.class_shares,
        preemption_mode=settings.preemption_mode,
        block_copy_seconds=block_copy_seconds,
        watermark=settings.watermark,
        check_invariants=settings.check_invariants,
    )
