"""From a model folder to a ModelRunner (see `model_runner`): checks, chooses, measures, sizes."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from engine.errors import ModelRefused
from engine.model.adapters import Adapter, read_adapters
from engine.model.attention import choose_backend, choose_decode
from engine.model.attention.interface import (
    AttentionBackend,
    AttentionNeeds,
    AttentionUnavailable,
)
from engine.model.attention.self_check import AttentionCheckFailed
from engine.model.causal_model import CausalModel
from engine.model.container import CGROUP, whole_processors
from engine.model.decoder import Decoder
from engine.model.determinism import NotInvariant, invariant_multiple
from engine.model.device_errors import cause_of, is_out_of_memory
from engine.model.fast_path import ModelPath, choose_model
from engine.model.graphs import CudaCapturer, DecodeGraphs
from engine.model.kernels.build import KernelsUnavailable
from engine.model.kv_pool import KVPool
from engine.model.loader import LoadedModel, load_model
from engine.model.memory import free_memory_bytes, memory_share, release_memory
from engine.model.model_runner import ConfigFacts, Limits, ModelRunner
from engine.model.native_decoder import NativeDecoder
from engine.model.pool_size import StepSize, blocks_in, memory_for_blocks, useful_blocks
from engine.model.probe import check_adapter, probe
from engine.model.rehearsal import Rehearsal
from engine.model.transformers_model import TransformersModel

logger = logging.getLogger(__name__)

#: Default of `max_num_batched_tokens`. On a CPU larger steps brought no more tokens a second (see
#: docs/performance-around-the-model.md), and the smaller a step, the sooner other requests get
#: their next token. A GPU computes hundreds in the time in which it reads the weights.
NUM_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}
#: How much of a KV pool is touched at load, and for how long at most: a virtual machine may take
#: seconds to map a gigabyte, which would otherwise delay the first prompts.
MADE_AT_LOAD_BYTES = 1 << 30
MADE_AT_LOAD_SECONDS = 1.0
#: How much of it is touched between two readings of the clock.
MADE_AT_ONCE_BYTES = 32 << 20


def load_runner(
    path: str | Path,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int | None = None,
    num_speculative_tokens: int = 0,
    max_speculative_step_tokens: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    block_size: int = 16,
    num_blocks: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    num_host_blocks: int = 0,
    attention_backend: str = "auto",
    model_path: ModelPath = "auto",
    deterministic: bool = False,
    async_scheduling: bool = True,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    now: Callable[[], float] | None = None,
) -> ModelRunner:
    """Load a model, check it and the attention backend on this machine, and size its KV pool.

    The pool has `num_blocks`; without it, as many as fit in `kv_cache_memory_bytes`; without both,
    a share of what the weights leave free, but no more than `max_num_seqs` requests of full
    length could use. `max_num_batched_tokens` is by default what suits the device, but at least
    twice `max_num_seqs`. A backend asked for by name excludes the C++ decoder, which has an
    attention of its own. `deterministic` promises that a token's logits do not depend on what is
    computed beside it. With `async_scheduling` a CUDA device gets its next step while one is in
    flight; on a CPU the same cores plan and compute, so it gains nothing. `adapters` are LoRA
    folders by the names that requests use. `now` is a clock in seconds: with it the log says how
    long checks took, and on a CPU the memory of the first blocks is touched.

    Raises:
        ModelRefused: the model, the backend or the memory does not allow it.
    """
    _keep_to_the_container()
    place = torch.device(_default_device() if device == "auto" else device)
    most_tokens = max_num_batched_tokens or max(NUM_BATCHED_TOKENS[place.type], 2 * max_num_seqs)
    limits = Limits(max_num_seqs, most_tokens, num_speculative_tokens, max_speculative_step_tokens)
    chosen = _choose(
        load_model(path, dtype=dtype, device=place),
        attention_backend=attention_backend,
        model_path=model_path,
        block_size=block_size,
        adapters=adapters,
        limits=limits,
        deterministic=deterministic,
        now=now,
    )
    release_memory(place)
    captures = place.type == "cuda" and not deterministic and isinstance(chosen.model, Decoder)
    kv_pool = _kv_pool(
        chosen,
        num_blocks=num_blocks or _num_blocks(chosen, limits, memory_bytes=kv_cache_memory_bytes),
        num_host_blocks=num_host_blocks,
        has_spare_block=captures or chosen.multiple > 1,
        now=now,
    )
    graphs = _graphs(chosen, kv_pool, limits) if captures else None
    return _runner(chosen, kv_pool, graphs, limits, async_scheduling=async_scheduling)


def _keep_to_the_container() -> None:
    """Use no more threads than the container has processors: torch counts the machine's.

    The threads of a step wait for each other, and once the container's CPU quota is used up all of
    them stand still for the rest of the period.
    """
    processors = whole_processors(CGROUP)
    if processors is not None and processors < torch.get_num_threads():
        torch.set_num_threads(processors)


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The model and backend that will serve, and facts of the loaded model, which is let go."""

    model: CausalModel
    backend: AttentionBackend
    block_size: int
    multiple: int
    needs: AttentionNeeds
    hidden_size: int
    width: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    folder: Path
    dtype: torch.dtype
    device: torch.device
    weights_fingerprint: str
    adapters: Mapping[str, str]
    max_rank: int


def _choose(
    loaded: LoadedModel,
    *,
    attention_backend: str,
    model_path: ModelPath,
    block_size: int,
    adapters: Mapping[str, Path],
    limits: Limits,
    deterministic: bool,
    now: Callable[[], float] | None,
) -> _Chosen:
    """Choose the attention backend and the form of the model that work best on this machine."""
    device = loaded.model.device
    served = probe(loaded.model, max_model_len=loaded.max_model_len)
    added = _add_adapters(served, adapters)
    needs = served.attention_needs
    try:
        backend, block_size = choose_backend(
            attention_backend,
            dtype=loaded.dtype,
            device=device,
            block_size=block_size,
            needs=needs,
            deterministic=deterministic,
        )
    except (AttentionCheckFailed, ValueError) as error:
        raise ModelRefused(str(error)) from error
    model = choose_model(
        served,
        adapters=added,
        model_path=model_path,
        block_size=block_size,
        compiled=attention_backend == "auto",
    )
    multiple = 1
    if deterministic:
        rehearsal = Rehearsal(
            dtype=loaded.dtype, device=device, block_size=block_size, backend=backend
        )
        multiple = _invariant_multiple(
            model, rehearsal, limits, loaded, windows=served.windows, adapters=added, now=now
        )
    return _Chosen(
        model=model,
        backend=backend,
        block_size=block_size,
        multiple=multiple,
        needs=needs,
        hidden_size=int(loaded.model.config.get_text_config().hidden_size),
        width=served.width,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        folder=loaded.folder,
        dtype=loaded.dtype,
        device=device,
        weights_fingerprint=loaded.fingerprint,
        adapters={adapter.name: adapter.fingerprint for adapter in added},
        max_rank=max((adapter.max_rank for adapter in added), default=0),
    )


def _add_adapters(served: TransformersModel, folders: Mapping[str, Path]) -> Sequence[Adapter]:
    adapters = read_adapters(served.model, folders)
    if adapters:
        served.add_adapters(adapters)
        # One is enough: all of them use the same hooks.
        check_adapter(served, adapters[0].name)
    return adapters


def _invariant_multiple(
    model: CausalModel,
    rehearsal: Rehearsal,
    limits: Limits,
    loaded: LoadedModel,
    *,
    windows: Sequence[int],
    adapters: Sequence[Adapter],
    now: Callable[[], float] | None,
) -> int:
    if adapters and not isinstance(model, NativeDecoder):
        raise ModelRefused(
            f"deterministic cannot be promised with adapters by {model.name}: what they add to a "
            "token would depend on how many others have the same"
        )
    started = now() if now is not None else 0.0
    try:
        multiple = invariant_multiple(
            model,
            rehearsal,
            adapters=[adapter.name for adapter in adapters],
            windows=windows,
            max_model_len=loaded.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
    except NotInvariant as reason:
        raise ModelRefused(f"deterministic cannot be promised here: {reason}") from reason
    if isinstance(model, NativeDecoder):
        model.free_logits()
    logger.info(
        "deterministic: %s with rows in multiples of %d; checked in %s seconds",
        model.name,
        multiple,
        "an unknown number of" if now is None else f"{now() - started:.2f}",
    )
    return multiple


def _num_blocks(chosen: _Chosen, limits: Limits, *, memory_bytes: int | None) -> int:
    """The size of the pool from the memory it may take."""
    shapes, sizes = chosen.model.layer_shapes, (chosen.block_size, chosen.dtype)
    if memory_bytes is not None:
        return blocks_in(memory_bytes, shapes, block_size=sizes[0], dtype=sizes[1])
    step = StepSize(
        num_tokens=limits.max_num_batched_tokens,
        num_logits=-(-limits.max_num_due // chosen.multiple) * chosen.multiple,
        hidden_size=chosen.hidden_size,
        width=chosen.width,
        vocab_size=chosen.model.vocab_size,
        dtype=chosen.dtype,
        max_rank=chosen.max_rank,
    )
    memory = memory_for_blocks(
        free_memory_bytes(chosen.device), step, share=memory_share(chosen.device)
    )
    useful = useful_blocks(
        max_num_seqs=limits.max_num_seqs,
        max_model_len=chosen.max_model_len,
        block_size=chosen.block_size,
    )
    return min(useful, blocks_in(memory, shapes, block_size=sizes[0], dtype=sizes[1]))


def _kv_pool(
    chosen: _Chosen,
    *,
    num_blocks: int,
    num_host_blocks: int,
    has_spare_block: bool,
    now: Callable[[], float] | None,
) -> KVPool:
    """The pool; ModelRefused if memory that was measured as free has been taken since."""
    try:
        pool = KVPool(
            chosen.model.layer_shapes,
            num_blocks=num_blocks,
            block_size=chosen.block_size,
            dtype=chosen.dtype,
            device=chosen.device,
            num_host_blocks=num_host_blocks,
            has_spare_block=has_spare_block,
        )
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelRefused(
            f"there is no room for a KV cache of {num_blocks} blocks on {chosen.device} and "
            f"{num_host_blocks} on the host: {cause_of(error)}"
        ) from error
    if now is not None and chosen.device.type == "cpu":
        _make_first_blocks(pool, now)
    return pool


def _make_first_blocks(kv_pool: KVPool, now: Callable[[], float]) -> None:
    give_up = now() + MADE_AT_LOAD_SECONDS
    wanted = min(kv_pool.num_blocks, MADE_AT_LOAD_BYTES // kv_pool.bytes_per_block)
    at_once = max(1, MADE_AT_ONCE_BYTES // kv_pool.bytes_per_block)
    for first in range(0, wanted, at_once):
        if now() >= give_up:
            return
        kv_pool.make(range(first, min(first + at_once, wanted)))


def _graphs(chosen: _Chosen, kv_pool: KVPool, limits: Limits) -> DecodeGraphs | None:
    """Captured decode steps, if an attention can be captured on this device.

    Raises:
        ModelRefused: a capture failed. We cannot go on without, as torch's allocator may take the
            capture for still under way.
    """
    decode = choose_decode(
        dtype=chosen.dtype,
        device=chosen.device,
        block_size=chosen.block_size,
        needs=chosen.needs,
    )
    if decode is None:
        return None
    try:
        with torch.inference_mode():
            return DecodeGraphs(
                chosen.model,
                kv_pool,
                decode,
                capturer=CudaCapturer(),
                device=chosen.device,
                max_num_seqs=limits.max_num_seqs,
                max_model_len=chosen.max_model_len,
            )
    except (RuntimeError, AttentionUnavailable, KernelsUnavailable) as error:
        raise ModelRefused(
            f"decode steps cannot be captured on {chosen.device}: {cause_of(error)}; "
            "with model_path 'wide' none are"
        ) from error


def _runner(
    chosen: _Chosen,
    kv_pool: KVPool,
    graphs: DecodeGraphs | None,
    limits: Limits,
    *,
    async_scheduling: bool,
) -> ModelRunner:
    return ModelRunner(
        chosen.model,
        kv_pool,
        backend=chosen.backend,
        facts=_facts(chosen, kv_pool, graphs, limits),
        device=chosen.device,
        limits=limits,
        multiple=chosen.multiple,
        graphs=graphs,
        runs_ahead=async_scheduling and chosen.device.type == "cuda",
    )


def _facts(
    chosen: _Chosen, kv_pool: KVPool, graphs: DecodeGraphs | None, limits: Limits
) -> ConfigFacts:
    path = [chosen.weights_fingerprint, chosen.model.name, chosen.backend.name, chosen.device.type]
    if chosen.multiple > 1:
        path.append(f"multiples-of-{chosen.multiple}")
    if graphs is not None:
        path.append(f"captured-{graphs.name}")
    return ConfigFacts(
        vocab_size=chosen.model.vocab_size,
        max_model_len=chosen.max_model_len,
        eos_token_ids=chosen.eos_token_ids,
        num_blocks=kv_pool.num_blocks,
        num_host_blocks=kv_pool.num_host_blocks,
        block_size=kv_pool.block_size,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        fingerprint="-".join(path),
        tokenizer_folder=chosen.folder,
        dtype=str(chosen.dtype).removeprefix("torch."),
        device=chosen.device.type,
        adapters=chosen.adapters,
    )
