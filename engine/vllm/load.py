"""Loads a model into vLLM, and says of what size it is and what its fingerprint is."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import MAX_SCORED_TOKENS
from engine.vllm.backend import Backend
from engine.vllm.config import Configured, VllmLimits, configure, refusing
from engine.vllm.invariance import refuse_if_batch_variant


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFacts:
    """A loaded vLLM, and the values that the model and the device determine.

    `fingerprint` identifies version, weights, precision and parallel sizes; see `ConfigFacts` of
    the native engine.
    """

    backend: Backend
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    #: See `EngineConfig`; 0 where vLLM does not compute every hidden state of a prompt.
    max_scored_tokens: int
    fingerprint: str
    source: Path
    dtype: str
    device: str
    #: The fingerprint of each adapter, by name.
    adapters: Mapping[str, str]
    #: Whether requests may have pictures.
    reads_pictures: bool


def load_vllm(
    path: str,
    limits: VllmLimits,
    *,
    given: Mapping[str, Any],
    adapters: Mapping[str, Path] | None = None,
) -> VllmFacts:
    """Load a model folder, and adapters by name from folders in PEFT's format.

    `given` are vLLM's own arguments, as the worker's table has them.

    Raises:
        ModelRefused: vLLM is not installed, refuses an argument, or cannot serve the model or an
            adapter.
    """
    configured = configure(path, limits, given=given, adapters=adapters or {})
    config = configured.vllm_config
    with refusing(path):
        from vllm.v1.engine.llm_engine import LLMEngine

        from engine.vllm.library import VllmBackend

        llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        with configured.adapters.plain_folders() as folders:
            size = config.model_config.get_vocab_size()
            backend = VllmBackend(llm, vocab_size=size, adapters=folders)
        backend.warm_up()
        facts = _facts(configured, backend)
        if configured.is_deterministic:
            refuse_if_batch_variant(
                backend,
                vocab_size=size,
                max_num_seqs=facts.max_num_seqs,
                max_model_len=facts.max_model_len,
            )
    return facts


def _facts(configured: Configured, backend: Backend) -> VllmFacts:
    """What the loaded engine has resolved."""
    config = configured.vllm_config
    model, cache = config.model_config, config.cache_config
    return VllmFacts(
        backend=backend,
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        eos_token_ids=configured.eos_token_ids,
        # One block is vLLM's own: it stands for tokens that are no longer needed.
        num_blocks=cache.num_gpu_blocks - 1,
        block_size=cache.block_size,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        max_scored_tokens=0 if cache.kv_sharing_fast_prefill else MAX_SCORED_TOKENS,
        fingerprint=_fingerprint(configured),
        source=configured.folder,
        dtype=_name_of(model.dtype),
        device=config.device_config.device_type,
        adapters=configured.adapters.fingerprints,
        reads_pictures=configured.reads_pictures,
    )


def _fingerprint(configured: Configured) -> str:
    """See VllmFacts."""
    import vllm

    from engine.model.wide.fingerprint import content_of_folder

    config = configured.vllm_config
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    version, dtype = f"vllm-{vllm.__version__}", _name_of(model.dtype)
    sizes = f"tp{parallel.tensor_parallel_size}-pp{parallel.pipeline_parallel_size}"
    digest: hashlib._Hash = content_of_folder(configured.folder, pictures=configured.reads_pictures)
    kernels = f"{_processor()}{' batch-invariant' if configured.is_deterministic else ''}"
    digest.update(f"{version} {dtype} {model.quantization} {cache.cache_dtype} {kernels}".encode())
    return f"{digest.hexdigest()[:32]}-{version}-{sizes}"


def _name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _processor() -> str:
    """The type of processor by which torch selects kernels."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return torch.backends.cpu.get_cpu_capability()
