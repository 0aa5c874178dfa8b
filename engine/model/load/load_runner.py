"""Loads a model folder into a ModelRunner: chooses the path, checks it, and sizes the KV pool."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from engine.config import NUM_SEQS, KVCacheDtype, StateCapacity
from engine.errors import ModelRefused
from engine.model.attention.interface import AttentionUnavailable
from engine.model.decoder.decoder import Decoder
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.device.container import CGROUP, whole_processors
from engine.model.device.device_errors import cause_of, is_out_of_memory
from engine.model.device.kv_pool import KVPool, bytes_per_block
from engine.model.device.memory import free_memory_bytes, memory_share, release_memory
from engine.model.device.pool_size import StepSize, blocks_in, memory_for_blocks, useful_blocks
from engine.model.device.step_threads import StepThreads
from engine.model.device.weight_files import weight_files_in
from engine.model.kernels.build import KernelsUnavailable
from engine.model.load.chosen import Chosen, choose
from engine.model.load.copy_time import block_copy_seconds, state_copy_seconds
from engine.model.load.encoder_memory import LargestPicture, encoder_memory
from engine.model.load.fast_path import ModelPath
from engine.model.load.states import StateSizes, state_sizes
from engine.model.run.graphs import CudaCapturer, DecodeGraphs
from engine.model.run.model_runner import ConfigFacts, Limits, ModelRunner
from engine.model.wide.loader import LoadedModel, load_model
from engine.model.wide.transformers_model import TransformersModel

#: Default of `max_num_batched_tokens`. On a CPU larger steps gave no higher throughput (see
#: docs/explanation/performance-log-service.md), and with smaller steps other requests get their
#: next token sooner. A GPU computes hundreds of tokens in the time in which it reads the weights.
NUM_BATCHED_TOKENS = {"cpu": 256, "cuda": 2048}
#: Default of the most bytes in a folder of shared weights.
SHARED_WEIGHTS_BYTES = 1 << 36
#: The memory of the host, where the blocks of swapped requests are.
HOST = torch.device("cpu")
#: Share of the host's free memory that these blocks take by default.
HOST_MEMORY_SHARE = 0.25
#: At load, at most this much of a KV pool is touched, for at most this time, so that its pages are
#: mapped: a virtual machine may need seconds per gigabyte, which would delay the first prompts.
TOUCHED_AT_LOAD_BYTES = 1 << 30
TOUCHED_AT_LOAD_SECONDS = 1.0
#: Bytes that are touched between two readings of the clock.
TOUCHED_AT_ONCE_BYTES = 32 << 20

logger = logging.getLogger(__name__)


def load_runner(
    path: str | Path,
    *,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None = None,
    num_speculative_tokens: int = 0,
    max_speculative_step_tokens: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    block_size: int = 16,
    num_blocks: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    num_host_blocks: int | None = None,
    num_state_snapshots: int | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    attention_backend: str = "auto",
    model_path: ModelPath = "auto",
    deterministic: bool = False,
    async_scheduling: bool = True,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    shared_weights: Path | None = None,
    shared_weights_bytes: int = SHARED_WEIGHTS_BYTES,
    remember_checks: bool = False,
    now: Callable[[], float] | None = None,
    load: Callable[..., LoadedModel] = load_model,
    largest_picture: LargestPicture | None = None,
) -> ModelRunner:
    """Load a model, check it and the attention backend on this machine, and size its KV pool.

    Without `num_blocks` and `kv_cache_memory_bytes`, the pool has a share of the free memory, at
    most what `max_num_seqs` requests of full length use; on a GPU, room for `largest_picture` is
    left. With a clock `now`, copies are timed and first blocks touched. ModelRefused if it cannot
    be served here.
    """
    target = prepared_device(device)
    rows, tokens = _step_limits(target, max_num_seqs, max_num_batched_tokens)
    limits = Limits(rows, tokens, num_speculative_tokens, max_speculative_step_tokens)
    chosen = choose(
        load(path, dtype=dtype, device=target),
        attention_backend=attention_backend,
        model_path=model_path,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        adapters=adapters,
        limits=limits,
        deterministic=deterministic,
        weight_files=weight_files_in(shared_weights, shared_weights_bytes),
        remembers=remember_checks,
        now=now,
    )
    release_memory(target)
    sizes = PoolSizes(
        num_blocks, kv_cache_memory_bytes, num_host_blocks, num_state_snapshots, largest_picture
    )
    return _with_pool(chosen, limits, sizes, async_scheduling=async_scheduling, now=now)


class PoolSizes(NamedTuple):
    """The sizes of the pools as in the settings; None for those that the memory decides."""

    num_blocks: int | None
    memory_bytes: int | None
    num_host_blocks: int | None
    num_state_snapshots: int | None
    #: Makes the picture that the memory must have room for, if it decides.
    largest_picture: LargestPicture | None


def _with_pool(
    chosen: Chosen,
    limits: Limits,
    sizes: PoolSizes,
    *,
    async_scheduling: bool,
    now: Callable[[], float] | None,
) -> ModelRunner:
    """A runner of the chosen form, with pools of their sizes."""
    captures = chosen.decode is not None and isinstance(chosen.model, Decoder)
    states = state_sizes(
        chosen,
        num_slots=limits.max_num_seqs,
        num_snapshots=sizes.num_state_snapshots,
        kv_bytes=_set_bytes(chosen, sizes),
    )
    kv_pool = _kv_pool(
        chosen,
        limits,
        states,
        num_blocks=sizes.num_blocks or _num_blocks(chosen, limits, states, sizes),
        num_host_blocks=sizes.num_host_blocks,
        has_spare_block=captures or chosen.multiple > 1,
        now=now,
    )
    graphs = _graphs(chosen, kv_pool, limits) if captures else None
    facts = _facts(chosen, kv_pool, graphs, limits, now)
    return _runner(chosen, kv_pool, graphs, limits, facts, async_scheduling=async_scheduling)


def _step_limits(device: torch.device, rows: int | None, tokens: int | None) -> tuple[int, int]:
    """The most rows and tokens of a step: as given, or the default of the device."""
    rows = rows or NUM_SEQS[device.type]
    return rows, tokens or max(NUM_BATCHED_TOKENS[device.type], 2 * rows)


def prepared_device(device: str) -> torch.device:
    """The device of a name, or of "auto", and torch prepared to compute there."""
    _limit_threads_to_container()
    _sum_in_float32()
    return torch.device(_default_device() if device == "auto" else device)


def _limit_threads_to_container() -> None:
    """Use no more threads than the container has processors; torch counts those of the machine.

    The threads of a step wait for each other. Once the container's CPU quota is used up, the kernel
    stops all of them for the rest of the period.
    """
    processors = whole_processors(CGROUP)
    if processors is not None and processors < torch.get_num_threads():
        torch.set_num_threads(processors)


def _sum_in_float32() -> None:
    """Let products on a GPU round their sums once, also where a sum is divided among programs.

    torch lets the matrix library add such parts in half precision by default.
    """
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _set_bytes(chosen: Chosen, sizes: PoolSizes) -> int:
    """Bytes of a KV pool whose size is set; 0 if the memory decides, or no layer has blocks."""
    shapes = chosen.model.layer_shapes
    if sizes.num_blocks is None or not shapes:
        return (sizes.memory_bytes or 0) if shapes else 0
    size = bytes_per_block(shapes, block_size=chosen.block_size, dtype=chosen.cache_dtype)
    return sizes.num_blocks * size


def _num_blocks(chosen: Chosen, limits: Limits, states: StateSizes, sizes: PoolSizes) -> int:
    """The number of blocks, from the memory that the pool may take."""
    shapes, block = chosen.model.layer_shapes, (chosen.block_size, chosen.cache_dtype)
    if sizes.memory_bytes is not None and shapes:
        return blocks_in(sizes.memory_bytes, shapes, block_size=block[0], dtype=block[1])
    step = StepSize(
        num_tokens=limits.max_num_batched_tokens,
        num_logits=-(-limits.max_num_due // chosen.multiple) * chosen.multiple,
        hidden_size=chosen.hidden_size,
        width=chosen.width,
        vocab_size=chosen.model.vocab_size,
        dtype=chosen.dtype,
        max_rank=chosen.max_rank,
        num_scored=limits.max_num_scored,
    )
    encoder = encoder_memory(chosen.model, chosen.device, chosen.source, sizes.largest_picture)
    free = free_memory_bytes(chosen.device) - states.nbytes
    memory = memory_for_blocks(free, step, share=memory_share(chosen.device), encoder=encoder)
    if not shapes:
        # Blocks without layers take no memory: they only count tokens.
        return _useful_blocks(chosen, limits)
    fitting = blocks_in(memory, shapes, block_size=block[0], dtype=block[1])
    return min(_useful_blocks(chosen, limits), fitting)


def _useful_blocks(chosen: Chosen, limits: Limits) -> int:
    return useful_blocks(
        max_num_seqs=limits.max_num_seqs,
        max_model_len=chosen.max_model_len,
        block_size=chosen.block_size,
    )


def _num_host_blocks(chosen: Chosen, limits: Limits, *, num_blocks: int) -> int:
    """The default size of the host's pool: no more blocks than the device has."""
    if num_blocks >= _useful_blocks(chosen, limits) or not chosen.model.layer_shapes:
        return 0
    size = bytes_per_block(
        chosen.model.layer_shapes, block_size=chosen.block_size, dtype=chosen.cache_dtype
    )
    try:
        memory = free_memory_bytes(HOST)
    except ModelRefused:
        return 0
    if chosen.device.type == "cpu":
        # The system maps the memory of the pool only when a request first uses it.
        memory -= num_blocks * size
    return min(num_blocks, max(0, int(memory * HOST_MEMORY_SHARE)) // size)


def _kv_pool(
    chosen: Chosen,
    limits: Limits,
    states: StateSizes,
    *,
    num_blocks: int,
    num_host_blocks: int | None,
    has_spare_block: bool,
    now: Callable[[], float] | None,
) -> KVPool:
    """Allocate the pool; ModelRefused if there is no longer enough free memory."""
    if num_host_blocks is None:
        num_host_blocks = _num_host_blocks(chosen, limits, num_blocks=num_blocks)
    try:
        pool = KVPool(
            chosen.model.layer_shapes,
            num_blocks=num_blocks,
            block_size=chosen.block_size,
            dtype=chosen.cache_dtype,
            device=chosen.device,
            num_host_blocks=num_host_blocks,
            has_spare_block=has_spare_block,
            states=states.pool(chosen, has_host_slots=num_host_blocks > 0),
        )
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelRefused(
            f"there is not enough memory for a KV cache of {num_blocks} blocks on "
            f"{chosen.device} and {num_host_blocks} on the host: {cause_of(error)}"
        ) from error
    if now is not None and chosen.device.type == "cpu" and pool.bytes_per_block:
        _touch_first_blocks(pool, now)
    return pool


def _touch_first_blocks(kv_pool: KVPool, now: Callable[[], float]) -> None:
    give_up = now() + TOUCHED_AT_LOAD_SECONDS
    wanted = min(kv_pool.num_blocks, TOUCHED_AT_LOAD_BYTES // kv_pool.bytes_per_block)
    at_once = max(1, TOUCHED_AT_ONCE_BYTES // kv_pool.bytes_per_block)
    for first in range(0, wanted, at_once):
        if now() >= give_up:
            return
        kv_pool.touch(range(first, min(first + at_once, wanted)))


def _graphs(chosen: Chosen, kv_pool: KVPool, limits: Limits) -> DecodeGraphs:
    """Capture decode steps.

    Raises:
        ModelRefused: a capture failed. The process cannot continue without captures, because
            torch's allocator may treat the failed capture as still running.
    """
    assert chosen.decode is not None
    try:
        with torch.inference_mode():
            return DecodeGraphs(
                chosen.model,
                kv_pool,
                chosen.decode,
                capturer=CudaCapturer(),
                device=chosen.device,
                max_num_seqs=limits.max_num_seqs,
                max_model_len=chosen.max_model_len,
            )
    except (RuntimeError, AttentionUnavailable, KernelsUnavailable) as error:
        raise ModelRefused(
            f"decode steps cannot be captured on {chosen.device}: {cause_of(error)}; "
            "use model_path 'wide', which captures none"
        ) from error


def _runner(
    chosen: Chosen,
    kv_pool: KVPool,
    graphs: DecodeGraphs | None,
    limits: Limits,
    facts: ConfigFacts,
    *,
    async_scheduling: bool,
) -> ModelRunner:
    return ModelRunner(
        chosen.model,
        kv_pool,
        backend=chosen.backend,
        facts=facts,
        device=chosen.device,
        limits=limits,
        multiple=chosen.multiple,
        graphs=graphs,
        runs_ahead=async_scheduling and chosen.device.type == "cuda",
        threads=StepThreads(torch.get_num_threads()) if chosen.device.type == "cpu" else None,
    )


def _facts(
    chosen: Chosen,
    kv_pool: KVPool,
    graphs: DecodeGraphs | None,
    limits: Limits,
    now: Callable[[], float] | None,
) -> ConfigFacts:
    path = [chosen.weights_fingerprint, chosen.model.name, chosen.backend.name, chosen.device.type]
    model = chosen.model
    if isinstance(model, Decoder | NativeDecoder | TransformersModel) and model.build:
        # Kernels from other sources or compilers may round differently.
        path.append(model.build)
    if chosen.multiple > 1:
        path.append(f"multiples-of-{chosen.multiple}")
    if graphs is not None:
        path.append(f"captured-{graphs.name}")
    states = kv_pool.states
    return ConfigFacts(
        vocab_size=chosen.model.vocab_size,
        max_model_len=chosen.max_model_len,
        eos_token_ids=chosen.eos_token_ids,
        num_blocks=kv_pool.num_blocks,
        num_host_blocks=kv_pool.num_host_blocks,
        block_size=kv_pool.block_size,
        bytes_per_block=kv_pool.bytes_per_block,
        block_copy_seconds=block_copy_seconds(kv_pool, chosen.device, now),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        fingerprint="-".join(path),
        tokenizer_source=chosen.source,
        dtype=str(chosen.dtype).removeprefix("torch."),
        device=chosen.device.type,
        adapters=chosen.adapters,
        reads_pictures=chosen.reads_pictures,
        states=None
        if states is None
        else StateCapacity(
            *(states.num_slots, states.num_host_slots, states.num_snapshots),
            state_copy_seconds(states, chosen.device, now),
        ),
    )
