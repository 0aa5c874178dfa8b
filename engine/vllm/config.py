"""Configures vLLM for the settings of a worker: environment, arguments, sampler and scheduler."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.config import NUM_SEQS
from engine.errors import ModelRefused
from engine.vllm.adapters import CheckedAdapters, check_adapters
from engine.vllm.arguments import engine_args
from engine.vllm.recurrent import caches_prefixes, refuse_if_wrong

#: What vLLM reads from the environment, and what the engine needs: the scheduler in this process,
#: and ranks that do not inherit the state of this process.
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
#: The key in vLLM's additional config that says that pictures are read.
PICTURES_KEY = "quire_pictures"
#: The types whose pictures vLLM reads. Each has a test that compares its tokens with transformers'.
READERS = frozenset({"idefics3", "llava", "llava_onevision", "qwen2_5_vl", "qwen3_vl", "smolvlm"})
#: What vLLM takes for the `vision_aspect_ratio` of LLaVA-OneVision, whatever its config says.
VISION_ASPECT_RATIO = "anyres_max_9"
#: The interface of samplers for vLLM's second runner.
_SLOTS = "vllm.v1.worker.gpu.sample.logits_processor"


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
    #: Whether vLLM may plan and launch a step while one is in flight.
    async_scheduling: bool = True
    #: vLLM's batch-invariant mode, checked at the start.
    deterministic: bool = False
    #: Whether requests may have pictures.
    pictures: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """VLLM's config for a model, and what else was read from its folder."""

    folder: Path
    vllm_config: Any
    eos_token_ids: frozenset[int]
    adapters: CheckedAdapters
    is_deterministic: bool
    reads_pictures: bool


def configure(
    path: str, limits: VllmLimits, *, given: Mapping[str, Any], adapters: Mapping[str, Path]
) -> Configured:
    """Configure vLLM; see `engine.vllm.load.load_vllm`. It begins to be loaded with this call.

    Raises:
        ModelRefused: vLLM is not installed, or refuses an argument, the model or an adapter.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ModelRefused(f"engine vllm serves folders of models; {path} has no config.json")
    try:
        is_cpu = _prepare_environment(limits)
        from engine.model.wide.loader import eos_token_ids_in
        from engine.vllm.sampling import EOS_KEY
    except ModuleNotFoundError as error:
        raise ModelRefused(f"engine vllm: the module {error.name} is missing") from error
    seqs = limits.max_num_seqs or NUM_SEQS["cpu" if is_cpu else "cuda"]
    limits = replace(limits, max_num_seqs=seqs)
    checked = check_adapters(folder, adapters, for_none=is_cpu)
    arguments = _arguments(folder, limits, dict(given), checked)
    if adapters and arguments.nnodes > 1:
        raise ModelRefused("adapters: engine vllm serves them on one machine only")
    with refusing(path):
        config = _for_its_runner(arguments, is_cpu=is_cpu)
        if limits.pictures:
            _read_pictures(config)
        eos = eos_token_ids_in(_sources_of_eos(folder, config.model_config))
        config.additional_config[EOS_KEY] = sorted(eos)
    return Configured(
        folder=folder,
        vllm_config=config,
        eos_token_ids=eos,
        adapters=checked,
        is_deterministic=limits.deterministic,
        reads_pictures=limits.pictures,
    )


@contextmanager
def refusing(path: str) -> Iterator[None]:
    """Raise any error as a ModelRefused of one line."""
    try:
        yield
    except Exception as error:
        raise ModelRefused(f"vLLM cannot serve {path}: {_first_line(error)}") from error


def _for_its_runner(arguments: Any, *, is_cpu: bool) -> Any:
    """VLLM's config, with the sampler and the scheduler for the runner that vLLM chooses.

    The first runner waits for the tokens of each step: with a logits processor it would do so in
    the next step, before it samples.
    """
    from engine.vllm.library import LinkedAsyncScheduler, LinkedScheduler

    config = arguments.create_engine_config()
    refuse_if_wrong(config.model_config, is_cpu=is_cpu)
    if arguments.enable_prefix_caching and not caches_prefixes(config.model_config, is_cpu=is_cpu):
        arguments = replace(arguments, enable_prefix_caching=False)
        config = arguments.create_engine_config()
    if getattr(config, "use_v2_model_runner", False):
        from engine.vllm.slots import SlotSampler

        config.model_config.logits_processors = [SlotSampler]
    else:
        from engine.vllm.processor import QuireSampler

        if config.scheduler_config.async_scheduling:
            config = replace(arguments, async_scheduling=False).create_engine_config()
        config.model_config.logits_processors = [QuireSampler]
    is_async = config.scheduler_config.async_scheduling
    config.scheduler_config.scheduler_cls = LinkedAsyncScheduler if is_async else LinkedScheduler
    return config


def _read_pictures(config: Any) -> None:
    """Let vLLM take pictures as Quire prepares them, here and in the ranks.

    Raises:
        ModelRefused: vLLM's pictures of this type of model were not compared.
    """
    from engine.vllm.pictures import use_prepared_pictures

    model = config.model_config.hf_config
    if model.model_type not in READERS:
        message = f"pictures of {model.model_type} are not read with vLLM"
        raise ModelRefused(f"pictures is set, but {message}")
    ratio = getattr(model, "vision_aspect_ratio", VISION_ASPECT_RATIO)
    if ratio != VISION_ASPECT_RATIO:
        # vLLM would make another number of outputs than there are placeholders.
        message = f"vLLM reads vision_aspect_ratio {VISION_ASPECT_RATIO} only, and not {ratio}"
        raise ModelRefused(f"pictures is set, but {message}")
    config.additional_config[PICTURES_KEY] = True
    use_prepared_pictures(config.model_config)


def _prepare_environment(limits: VllmLimits) -> bool:
    """Set what vLLM reads when it is imported; return whether it computes on a CPU."""
    os.environ.update(_ENVIRONMENT)
    from vllm.platforms import current_platform

    is_cpu: bool = current_platform.is_cpu()
    # A fingerprint tells this mode by the setting, so nothing else may turn it on.
    os.environ.pop("VLLM_BATCH_INVARIANT", None)
    if limits.deterministic:
        if is_cpu:
            raise ModelRefused("deterministic: vLLM has no batch-invariant mode on a CPU")
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if find_spec(_SLOTS) is None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return is_cpu


def _arguments(
    folder: Path, limits: VllmLimits, given: dict[str, Any], adapters: CheckedAdapters
) -> Any:
    """The EngineArgs; ModelRefused for an argument that cannot be served."""
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
        "worker_cls": "engine.vllm.rank.Rank",
        "async_scheduling": None if limits.async_scheduling else False,
        "disable_log_stats": True,
        "additional_config": {},
        "seed": 0,
    }
    assert limits.max_num_seqs is not None
    if limits.pictures:
        # Pixels come prepared, so there is nothing to cache, and no picture to measure memory with.
        ours |= {"mm_processor_cache_gb": 0, "skip_mm_profiling": True}
    loras = adapters.arguments(max_num_seqs=limits.max_num_seqs)
    ours |= {name: value for name, value in loras.items() if name not in given}
    return engine_args(given, ours)


def _sources_of_eos(folder: Path, model: Any) -> list[Any]:
    """The configs that name the end-of-sequence tokens, as for the native engine."""
    from transformers import GenerationConfig

    sources = [model.hf_config, model.hf_text_config]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(str(folder)))
    return sources


def _first_line(error: BaseException) -> str:
    """What an error says first; pydantic says first how many errors there are."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if len(lines) > 1 and "validation error" in lines[0]:
        return lines[1]
    return lines[0] if lines else type(error).__name__
