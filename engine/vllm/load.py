"""Loads a model into vLLM: its arguments, its sizes, its fingerprint."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config import MAX_SCORED_TOKENS, NUM_SEQS
from engine.errors import ModelRefused
from engine.vllm.adapters import CheckedAdapters, check_adapters
from engine.vllm.arguments import engine_args
from engine.vllm.backend import Backend
from engine.vllm.invariance import refuse_if_batch_variant

#: What vLLM reads from the environment, and what the engine needs: the scheduler in this process,
#: the runner that calls logits processors with a row for each request, and ranks that do not
#: inherit the state of this process.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLimits:
    """The settings of a worker that vLLM gets; None for a default of vLLM or of the device."""

    max_num_seqs: int | None
    dtype: str = "auto"
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    max_model_len: int | None = None
    #: vLLM's batch-invariant mode, checked at the start.
    deterministic: bool = False


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
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ModelRefused(f"engine vllm serves folders of models; {path} has no config.json")
    try:
        is_cpu = _prepare_environment(limits)
        from vllm.v1.engine.llm_engine import LLMEngine

        from engine.model.wide.loader import eos_token_ids_in
        from engine.vllm.library import VllmBackend
        from engine.vllm.processor import EOS_KEY
    except ModuleNotFoundError as error:
        raise ModelRefused(f"engine vllm: the module {error.name} is missing") from error
    seqs = limits.max_num_seqs or NUM_SEQS["cpu" if is_cpu else "cuda"]
    limits = replace(limits, max_num_seqs=seqs)
    checked = check_adapters(folder, adapters or {}, for_none=is_cpu)
    arguments = _arguments(folder, limits, dict(given), checked)
    try:
        config = arguments.create_engine_config()
        eos = eos_token_ids_in(_sources_of_eos(folder, config.model_config))
        config.additional_config[EOS_KEY] = sorted(eos)
        llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        with checked.plain_folders() as folders:
            size = config.model_config.get_vocab_size()
            backend = VllmBackend(llm, vocab_size=size, adapters=folders)
        backend.warm_up()
        facts = _facts(folder, config, backend, eos, checked, limits)
        if limits.deterministic:
            refuse_if_batch_variant(
                backend,
                vocab_size=size,
                max_num_seqs=facts.max_num_seqs,
                max_model_len=facts.max_model_len,
            )
    except Exception as error:
        raise ModelRefused(f"vLLM cannot serve {path}: {_first_line(error)}") from error
    return facts


def _prepare_environment(limits: VllmLimits) -> bool:
    """Set what vLLM reads when it is imported; return whether it computes on a CPU."""
    os.environ.update(_ENVIRONMENT)
    from vllm.platforms import current_platform

    is_cpu: bool = current_platform.is_cpu()
    if limits.deterministic:
        if is_cpu:
            raise ModelRefused("deterministic: vLLM has no batch-invariant mode on a CPU")
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    return is_cpu


def _arguments(
    folder: Path, limits: VllmLimits, given: dict[str, Any], adapters: CheckedAdapters
) -> Any:
    """The EngineArgs; ModelRefused for an argument that cannot be served."""
    from engine.vllm.library import LinkedScheduler
    from engine.vllm.processor import QuireSampler

    if limits.max_model_len is not None:
        if "max_model_len" in given:
            raise ModelRefused("vllm: set max_model_len once, not for the worker and for vLLM")
        given["max_model_len"] = limits.max_model_len
    ours: dict[str, Any] = {
        "model": str(folder),
        "dtype": limits.dtype,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "long_prefill_token_threshold": limits.long_prefill_token_threshold,
        "num_gpu_blocks_override": limits.num_blocks and limits.num_blocks + 1,
        "kv_cache_memory_bytes": limits.kv_cache_memory_bytes,
        "enable_prefix_caching": limits.enable_prefix_caching,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "load_format": "safetensors",
        "scheduling_policy": "priority",
        "scheduler_cls": LinkedScheduler,
        "logits_processors": [QuireSampler],
        "worker_cls": "engine.vllm.rank.Rank",
        "async_scheduling": False,
        "disable_log_stats": True,
        "additional_config": {},
        "seed": 0,
    }
    assert limits.max_num_seqs is not None
    loras = adapters.arguments(max_num_seqs=limits.max_num_seqs)
    ours |= {name: value for name, value in loras.items() if name not in given}
    return engine_args(given, ours)


def _facts(
    folder: Path,
    config: Any,
    backend: Backend,
    eos: frozenset[int],
    adapters: CheckedAdapters,
    limits: VllmLimits,
) -> VllmFacts:
    """What the loaded engine has resolved."""
    import vllm

    from engine.model.wide.loader import content_of_folder

    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    version, dtype = f"vllm-{vllm.__version__}", str(model.dtype).removeprefix("torch.")
    sizes = f"tp{parallel.tensor_parallel_size}-pp{parallel.pipeline_parallel_size}"
    digest: hashlib._Hash = content_of_folder(folder)
    kernels = f"{_processor()}{' batch-invariant' if limits.deterministic else ''}"
    digest.update(f"{version} {dtype} {model.quantization} {cache.cache_dtype} {kernels}".encode())
    return VllmFacts(
        backend=backend,
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        eos_token_ids=eos,
        # One block is vLLM's own: it stands for tokens that are no longer needed.
        num_blocks=cache.num_gpu_blocks - 1,
        block_size=cache.block_size,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        max_scored_tokens=0 if cache.kv_sharing_fast_prefill else MAX_SCORED_TOKENS,
        fingerprint=f"{digest.hexdigest()[:32]}-{version}-{sizes}",
        source=folder,
        dtype=dtype,
        device=config.device_config.device_type,
        adapters=adapters.fingerprints,
    )


def _sources_of_eos(folder: Path, model: Any) -> list[Any]:
    """The configs that name the end-of-sequence tokens, as for the native engine."""
    from transformers import GenerationConfig

    sources = [model.hf_config, model.hf_text_config]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(str(folder)))
    return sources


def _processor() -> str:
    """The type of processor by which torch selects kernels."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return torch.backends.cpu.get_cpu_capability()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
