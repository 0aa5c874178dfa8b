"""Loads what a worker serves: the engine with its model, and the tokenizer of the model.

This is the only module of `service` that imports `engine.model`, and with it torch. It does so
inside a function, so that `--help` and the tests of the service need not load torch.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ModelRefused
from engine.port import TokenEngine
from quire.queue.rank.policy import QueuePolicy
from service.shared.logs import take_over_libraries
from service.worker.constraints.grammars import Grammars, NoGrammars, load_grammars
from service.worker.model.adapters import find_adapters
from service.worker.model.engine_config import engine_config
from service.worker.model.garbage import importing, keep_out_of_collections
from service.worker.model.pictures import PictureProcessor, fingerprint_with, limit_on
from service.worker.model.progress import Loading
from service.worker.model.text import ModelTokenizer
from service.worker.model.vectors import ServedVectors
from service.worker.observe.metrics import MemoryReader
from service.worker.settings.config import Settings

if TYPE_CHECKING:
    from engine.model.run.model_runner import ConfigFacts
    from engine.vllm.config import VllmLimits
    from engine.vllm.load import VllmFacts

_log = structlog.get_logger("service.worker.model")

#: Settings of every decoder, with the names that its loader gives to its arguments.
OF_DECODERS = (
    *("block_size", "num_blocks", "kv_cache_memory_bytes", "attention_backend", "model_path"),
    "kv_cache_dtype",
    *("shared_weights", "shared_weights_bytes", "remember_checks"),
)
NO_HOST_BLOCKS = (
    "preemption_mode 'swap' needs blocks in host memory, and by default there are none here: "
    "requests of full length fit on the device, or too little memory is free. Set "
    "num_host_blocks to 1 or more, or preemption_mode to 'recompute'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that is ready to generate.

    `fingerprint` covers everything that may change a token: weights, tokenizer, data type,
    attention backend, library, kind of processor. It is recorded at the first claim of a request.
    `adapters` has the fingerprint of each adapter by name; it differs between revisions.
    """

    engine: TokenEngine
    tokenizer: ModelTokenizer
    fingerprint: str
    #: Labels of quire_build_info: torch, device, dtype.
    build: Mapping[str, str] = field(default_factory=dict)
    read_memory: MemoryReader | None = None
    read_threads: Callable[[], int] | None = None
    #: Bytes of one block of the KV cache; 0 where the engine has no tensors.
    bytes_per_block: int = 0
    adapters: Mapping[str, str] = field(default_factory=dict)
    grammars: Grammars = field(default_factory=lambda: NoGrammars("none were loaded"))
    #: The vectors of a model that makes vectors and no text; None for one that generates.
    vectors: ServedVectors | None = None
    #: Prepares the pictures of chats; None for a model that reads none.
    pictures: PictureProcessor | None = None
    #: Makes the engine call a function after each layer of its encoder of pictures; None without.
    follow_encoder: Callable[[Callable[[], None]], None] | None = None

    @property
    def cache_bytes(self) -> dict[str, int]:
        """Bytes of one block of the KV cache, and of all blocks on the device and on the host."""
        config, size = self.engine.config, self.bytes_per_block
        return {
            "block": size,
            "device": config.num_blocks * size,
            "host": config.num_host_blocks * size,
        }

    @property
    def sizes(self) -> dict[str, int]:
        """The engine's limits: requests that run together, blocks, and tokens in each block."""
        config = self.engine.config
        return {
            "max_num_seqs": config.max_num_seqs,
            "block_size": config.block_size,
            "num_blocks": config.num_blocks,
        }

    @property
    def queue_policy(self) -> QueuePolicy:
        """The engine's policy, by which the queue is ranked, too."""
        config = self.engine.config
        aging_ms = max(1, round(1000 * config.aging_seconds))
        return QueuePolicy(config.policy, aging_ms, config.max_model_len)

    @property
    def abilities(self) -> dict[str, float]:
        """Which requests this worker can serve. In the registry, because workers may differ."""
        has_grammars = not isinstance(self.grammars, NoGrammars)
        longest = self.engine.config.max_request_tokens
        able = {"grammars": float(has_grammars), "max_model_len": float(longest)}
        return able if self.vectors is None else able | {self.vectors.kind: 1.0}


def load_model(settings: Settings) -> ServedModel:
    """Load the model of `settings`, in seconds to minutes. Call it on the engine thread.

    Raises:
        ModelRefused: this model cannot be served here; the message has the reason.
    """
    with Loading(settings) as loading:
        if settings.engine == "vllm":
            served = _load_vllm(settings)
        elif (task := _task_of(settings)) != "generate":
            served = _load_pooler(settings, task, loading)
        else:
            served = _load_decoder(settings, loading)
        from engine.model.device.memory import release_memory

        # To read a vocabulary takes several times the memory that it needs afterwards.
        release_memory(served.build["device"])
        keep_out_of_collections()
        return served


def _load_decoder(settings: Settings, loading: Loading) -> ServedModel:
    """Load the model of `settings` that generates."""
    try:
        with importing("engine.model.load.load_runner"):
            from engine.model.load.load_runner import load_runner
            from engine.model.load.quantize import load_quantized
    except ModuleNotFoundError as error:
        raise ModelRefused(f"no model can be loaded: the module {error.name} is missing") from error

    loading.follow_transformers()
    runner = load_runner(
        settings.model_source,
        dtype=settings.dtype,
        device=settings.device,
        num_host_blocks=0 if settings.preemption_mode == "recompute" else settings.num_host_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        num_speculative_tokens=settings.num_speculative_tokens,
        max_speculative_step_tokens=settings.max_speculative_step_tokens,
        deterministic=settings.deterministic,
        async_scheduling=settings.async_scheduling,
        adapters=find_adapters(settings.adapters),
        now=time.monotonic,
        load=partial(
            load_quantized, quantization=settings.quantization, pictures=settings.pictures
        ),
        num_state_snapshots=_num_snapshots(settings),
        largest_picture=partial(_largest_picture, settings),
        **{name: getattr(settings, name) for name in OF_DECODERS},
    )
    facts = runner.config_facts
    if settings.preemption_mode == "swap" and not facts.num_host_blocks:
        raise ModelRefused(NO_HOST_BLOCKS)
    config = _config_from(facts, settings)
    _warn_of_lengths(settings, config, model_reads=facts.max_model_len)
    tokenizer = _tokenizer_in(facts.tokenizer_source)
    pictures = _pictures_for(tokenizer, facts, settings, facts.tokenizer_source)
    reader = getattr(runner.model, "picture_reader", None)
    return ServedModel(
        engine=Engine(config, runner),
        tokenizer=tokenizer,
        fingerprint=fingerprint_with(pictures, facts.fingerprint),
        build={"torch": version("torch"), "device": facts.device, "dtype": facts.dtype},
        read_memory=runner.device_memory,
        read_threads=runner.num_threads,
        bytes_per_block=facts.bytes_per_block,
        pictures=pictures,
        follow_encoder=reader.follow if reader is not None else None,
        adapters=facts.adapters,
        grammars=_grammars_for(tokenizer, config),
    )


def _num_snapshots(settings: Settings) -> int | None:
    """Snapshots of a recurrent state; None for as many as the memory holds."""
    return settings.num_state_snapshots if settings.enable_prefix_caching else 0


def _task_of(settings: Settings) -> str:
    """What the model makes: as the setting says, or the files of the model's folder."""
    from engine.model.pooling.folder import task_of

    source = Path(settings.model_source)
    if settings.task == "auto" and source.is_dir():
        return str(task_of(source))
    return "generate" if settings.task == "auto" else settings.task


def _load_pooler(settings: Settings, task: str, loading: Loading) -> ServedModel:
    """Load the model of `settings` for embeddings, or for the scores of its head."""
    try:
        with importing("engine.model.load.load_pooler"):
            from engine.model.load.load_pooler import load_classifier, load_embedder
    except ModuleNotFoundError as error:
        raise ModelRefused(f"no model can be loaded: the module {error.name} is missing") from error
    if settings.quantization is not None:
        raise ModelRefused(f"quantization is served of models that generate, and task is {task!r}")

    loading.follow_transformers()
    sizes: dict[str, Any] = {
        name: getattr(settings, name)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "dtype", "device")
    }
    if task == "classify":
        loaded = load_classifier(settings.model_source, **sizes)
    else:
        loaded = load_embedder(
            settings.model_source,
            pooling=None if settings.pooling == "auto" else settings.pooling,
            adapters=find_adapters(settings.adapters),
            num_host_blocks=0,
            async_scheduling=False,
            now=time.monotonic,
            deterministic=settings.deterministic,
            num_state_snapshots=_num_snapshots(settings),
            **{name: getattr(settings, name) for name in OF_DECODERS},
            **sizes,
        )
    facts, folder = loaded.facts, loaded.folder
    config = replace(_config_from(facts, settings), pools=True, num_speculative_tokens=0)
    if loaded.is_encoder:
        whole: dict[str, Any] = {"whole_prompts": True, "enable_prefix_caching": False}
        whole |= {"long_prefill_token_threshold": 0, "max_prefill_tokens": 0}
        config = replace(config, **whole)
    return ServedModel(
        engine=Engine(config, loaded.runner),
        tokenizer=ModelTokenizer.load(str(facts.tokenizer_source)),
        fingerprint=facts.fingerprint,
        build={"torch": version("torch"), "device": facts.device, "dtype": facts.dtype},
        read_memory=loaded.device_memory,
        read_threads=loaded.num_threads,
        bytes_per_block=facts.bytes_per_block,
        adapters=facts.adapters,
        grammars=NoGrammars("the model makes vectors"),
        vectors=ServedVectors(
            kind="scores" if task == "classify" else "embeddings",
            width=loaded.width,
            prompts=folder.prompts,
            default_prompt=folder.default_prompt,
            lowers=folder.lowers,
            labels=loaded.labels,
        ),
    )


def _load_vllm(settings: Settings) -> ServedModel:
    """Load the model of `settings` into vLLM; the tokenizer, text and constraints are ours."""
    try:
        from engine.vllm.load import load_vllm
    except ModuleNotFoundError as error:
        raise ModelRefused(f"no model can be loaded: the module {error.name} is missing") from error

    take_over_libraries()
    facts = load_vllm(
        settings.model_source,
        vllm_limits(settings),
        given=settings.vllm,
        adapters=find_adapters(settings.adapters),
    )
    return served_by_vllm(settings, facts)


def vllm_limits(settings: Settings) -> "VllmLimits":
    """What vLLM gets of the settings, besides the table `vllm`."""
    from engine.vllm.config import VllmLimits

    names = [each.name for each in fields(VllmLimits)]
    return VllmLimits(**{name: getattr(settings, name) for name in names})


def served_by_vllm(settings: Settings, facts: "VllmFacts") -> ServedModel:
    """A loaded vLLM with an engine of Quire around it."""
    from engine.vllm.engine import VllmEngine

    config = engine_config(
        settings,
        num_blocks=facts.num_blocks,
        num_host_blocks=0,
        block_size=facts.block_size,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        adapters=facts.adapters,
        reads_pictures=facts.reads_pictures,
    )
    config = replace(config, max_scored_tokens=facts.max_scored_tokens)
    _warn_of_lengths(settings, config, model_reads=facts.max_model_len)
    tokenizer = _tokenizer_in(facts.source)
    pictures = _pictures_for(tokenizer, facts, settings, facts.source)
    return ServedModel(
        engine=VllmEngine(config, facts.backend),
        tokenizer=tokenizer,
        fingerprint=fingerprint_with(pictures, facts.fingerprint),
        build={"torch": version("torch"), "device": facts.device, "dtype": facts.dtype},
        pictures=pictures,
        adapters=facts.adapters,
        grammars=_grammars_for(tokenizer, config),
    )


def _config_from(facts: "ConfigFacts", settings: Settings) -> EngineConfig:
    return engine_config(
        settings,
        num_blocks=facts.num_blocks,
        num_host_blocks=facts.num_host_blocks,
        block_copy_seconds=facts.block_copy_seconds,
        block_size=facts.block_size,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        adapters=facts.adapters,
        reads_pictures=facts.reads_pictures,
    ).with_states(facts.states)


def _warn_of_lengths(settings: Settings, config: EngineConfig, *, model_reads: int) -> None:
    """Warn if requests must be shorter than the settings or the model suggest."""
    if (settings.max_model_len or 0) > model_reads:
        _log.warning(
            "the model's context is shorter than max_model_len",
            asked=settings.max_model_len,
            max_model_len=model_reads,
        )
    if config.max_request_tokens < config.max_model_len:
        _log.warning(
            "the KV cache is smaller than the model's context; raise num_blocks",
            num_blocks=config.num_blocks,
            longest_request=config.max_request_tokens,
            max_model_len=config.max_model_len,
        )


def _tokenizer_in(source: Path) -> ModelTokenizer:
    tokenizer = ModelTokenizer.load(str(source))
    if tokenizer.why_no_chat is not None:
        _log.info("no chats", reason=tokenizer.why_no_chat)
    return tokenizer


def _pictures_for(
    tokenizer: ModelTokenizer, facts: "ConfigFacts | VllmFacts", settings: Settings, source: Path
) -> PictureProcessor | None:
    if settings.pictures and not facts.reads_pictures:
        raise ModelRefused("pictures is set, but pictures of this type of model are not read")
    if not settings.pictures:
        return None
    most = limit_on(facts.device, settings.max_picture_pixels)
    return PictureProcessor.load(str(source), tokenizer.backend, max_pixels=most)


def _largest_picture(settings: Settings, source: Path) -> Mapping[str, Any]:
    """What the encoder gets of the largest picture, on a GPU."""
    tokenizer = ModelTokenizer.load(str(source))
    most = settings.max_picture_pixels
    return PictureProcessor.load(str(source), tokenizer.backend, max_pixels=most).largest()


def _grammars_for(tokenizer: ModelTokenizer, config: EngineConfig) -> Grammars:
    grammars = load_grammars(
        tokenizer.backend, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids
    )
    if isinstance(grammars, NoGrammars):
        # Without this line, the first sign would be a refused request.
        _log.info("no grammars", reason=grammars.reason)
    return grammars
