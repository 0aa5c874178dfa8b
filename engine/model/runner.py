"""Executes a Batch: block copies, tensors, forward pass, sampler. Knows no request beyond its row.

`load_runner` is the way from a model folder to a runner; `ModelRunner.run` is a step.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.batch import Batch, BatchRow
from engine.errors import DeviceFailed, ModelRefused
from engine.model.attention import choose_backend
from engine.model.attention.interface import AttentionBackend
from engine.model.attention.self_check import AttentionCheckFailed
from engine.model.causal_model import CausalModel
from engine.model.determinism import NotInvariant, invariant_multiple
from engine.model.fast_path import ModelPath, choose_model
from engine.model.kv_pool import KVPool
from engine.model.loader import LoadedModel, load_model
from engine.model.memory import free_memory_bytes, memory_share
from engine.model.pool_size import StepSize, blocks_in, memory_for_blocks, useful_blocks
from engine.model.probe import probe
from engine.model.rehearsal import Rehearsal
from engine.model.sampler import Sampler
from engine.model.step import compute_logits, lay_out

#: What a sticky CUDA error looks like where torch has no type of its own for it.
_STICKY_MESSAGES = ("CUDA error", "CUBLAS_STATUS_EXECUTION_FAILED", "device-side assert")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFacts:
    """What the model and its device decide about an EngineConfig.

    Args:
        fingerprint: of weights, precision, libraries and code path; where it differs, a resumed
            generation may leave the path it was on at a near-tie.
        tokenizer_folder: where the tokenizer files are.
        dtype, device: what "auto" has become.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    num_blocks: int
    num_host_blocks: int
    block_size: int
    fingerprint: str
    tokenizer_folder: Path
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step: as in the EngineConfig."""

    max_num_seqs: int
    max_num_batched_tokens: int


class ModelRunner:
    """One model, its KV pool, an attention backend and a sampler.

    Runs on one thread at a time; several runners may live in one process.

    Args:
        limits: those of the EngineConfig beside it.
        multiple: what the numbers of rows are filled up to, see `compute_logits`.
    """

    def __init__(
        self,
        model: CausalModel,
        kv_pool: KVPool,
        *,
        backend: AttentionBackend,
        facts: ConfigFacts,
        device: torch.device,
        limits: Limits,
        multiple: int = 1,
    ) -> None:
        self.config_facts = facts
        self.kv_pool = kv_pool
        self.model = model
        self._backend = backend
        self._device = device
        self._sampler = Sampler(facts.eos_token_ids)
        self._limits = limits
        self._multiple = multiple

    @torch.inference_mode()
    def run(self, batch: Batch) -> dict[str, int]:
        """Next token id of every row that samples, by request id.

        Raises:
            DeviceFailed: a sticky device error, or block copies that stopped half-way.
            Exception: the rows failed; the copies are done and must not be repeated.
        """
        assert len(batch.rows) <= self._limits.max_num_seqs
        assert batch.num_tokens <= self._limits.max_num_batched_tokens
        self._move_blocks(batch)
        if not batch.rows:
            return {}
        try:
            return self._compute(batch.rows)
        except Exception as error:
            if is_device_failure(error):
                raise DeviceFailed(f"the device failed in step {batch.step}: {error}") from error
            raise

    def device_memory(self) -> dict[str, int]:
        """Bytes of device memory by kind: allocated, reserved, total; empty on a CPU."""
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        return {"allocated": allocated, "reserved": total - free, "total": total}

    def _move_blocks(self, batch: Batch) -> None:
        try:
            self.kv_pool.swap_out(batch.swap_out)
            self.kv_pool.swap_in(batch.swap_in)
        except (RuntimeError, IndexError) as error:
            raise DeviceFailed(f"block copies of step {batch.step} failed: {error}") from error

    def _compute(self, rows: Sequence[BatchRow]) -> dict[str, int]:
        step = lay_out(rows, block_size=self.kv_pool.block_size, device=self._device)
        logits = compute_logits(
            step,
            model=self.model,
            kv_pool=self.kv_pool,
            backend=self._backend,
            multiple=self._multiple,
        )
        due = [row for row in rows if row.samples]
        if not due:
            return {}
        # Logits may be wider than the vocabulary: padding that no token stands for is cut off.
        tokens = self._sampler.sample(logits[:, : self.model.vocab_size], due)
        return {row.request_id: token for row, token in zip(due, tokens, strict=True)}


def load_runner(
    path: str | Path,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    dtype: str = "auto",
    device: str = "auto",
    block_size: int = 16,
    num_blocks: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    num_host_blocks: int = 0,
    attention_backend: str = "auto",
    model_path: ModelPath = "auto",
    deterministic: bool = False,
    now: Callable[[], float] | None = None,
) -> ModelRunner:
    """Load a model, check it and the attention backend on this machine, and size its KV pool.

    The pool has `num_blocks`; or as many as fit in `kv_cache_memory_bytes`; or, when neither is
    given, a share of what is free after the weights, but no more than `max_num_seqs` requests of
    full length could use. A backend asked for by name is the one that attends: the compiled form of
    the fast path, which has its own, is then left out.

    `deterministic` promises that a token's logits do not depend on what is computed beside it, and
    `now`, a clock in seconds, says in the log what finding that out has cost.

    Raises:
        ModelRefused: the model, the backend or the memory does not allow it.
    """
    limits = Limits(max_num_seqs, max_num_batched_tokens)
    place = torch.device(_default_device() if device == "auto" else device)
    loaded = load_model(path, dtype=dtype, device=place)
    backend = _backend(
        attention_backend, loaded, block_size=block_size, deterministic=deterministic
    )
    model = choose_model(
        probe(loaded.model, max_model_len=loaded.max_model_len),
        model_path=model_path,
        block_size=block_size,
        compiled=attention_backend == "auto",
    )
    multiple = 1
    if deterministic:
        rehearsal = Rehearsal(
            dtype=loaded.dtype, device=place, block_size=block_size, backend=backend
        )
        multiple = _invariant_multiple(
            model, rehearsal, limits, max_model_len=loaded.max_model_len, now=now
        )
    if num_blocks is None:
        num_blocks = _num_blocks(
            loaded,
            model,
            block_size=block_size,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            limits=limits,
        )
    kv_pool = KVPool(
        model.layer_shapes,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=loaded.dtype,
        device=place,
        num_host_blocks=num_host_blocks,
        has_spare_block=multiple > 1,
    )
    return ModelRunner(
        model,
        kv_pool,
        backend=backend,
        facts=_facts(loaded, model, kv_pool, _fingerprint(loaded, model, backend, multiple)),
        device=place,
        limits=limits,
        multiple=multiple,
    )


def is_device_failure(error: BaseException) -> bool:
    """Whether a CUDA error outlives its step.

    Running out of memory fails one allocation and leaves the device as it was; an illegal address,
    a failed assertion in a kernel or a lost device poisons every call that follows.
    """
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return False
    sticky_type = getattr(torch, "AcceleratorError", None)
    if sticky_type is not None and isinstance(error, sticky_type):
        return True
    return isinstance(error, RuntimeError) and any(
        message in str(error) for message in _STICKY_MESSAGES
    )


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _facts(
    loaded: LoadedModel, model: CausalModel, kv_pool: KVPool, fingerprint: str
) -> ConfigFacts:
    return ConfigFacts(
        vocab_size=model.vocab_size,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        num_blocks=kv_pool.num_blocks,
        num_host_blocks=kv_pool.num_host_blocks,
        block_size=kv_pool.block_size,
        fingerprint=fingerprint,
        tokenizer_folder=loaded.folder,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=loaded.model.device.type,
    )


def _backend(
    name: str, loaded: LoadedModel, *, block_size: int, deterministic: bool
) -> AttentionBackend:
    """The attention backend of this name, or the reason why the model cannot be served with it."""
    try:
        return choose_backend(
            name,
            dtype=loaded.dtype,
            device=loaded.model.device,
            block_size=block_size,
            deterministic=deterministic,
        )
    except (AttentionCheckFailed, ValueError) as error:
        raise ModelRefused(str(error)) from error


def _num_blocks(
    loaded: LoadedModel,
    model: CausalModel,
    *,
    block_size: int,
    kv_cache_memory_bytes: int | None,
    limits: Limits,
) -> int:
    """The size of the pool from the memory it may take."""
    shapes, dtype = model.layer_shapes, loaded.dtype
    if kv_cache_memory_bytes is not None:
        return blocks_in(kv_cache_memory_bytes, shapes, block_size=block_size, dtype=dtype)
    device = loaded.model.device
    step = StepSize(
        num_tokens=limits.max_num_batched_tokens,
        num_logits=limits.max_num_seqs,
        hidden_size=int(loaded.model.config.get_text_config().hidden_size),
        vocab_size=model.vocab_size,
        dtype=dtype,
    )
    memory = memory_for_blocks(free_memory_bytes(device), step, share=memory_share(device))
    return min(
        blocks_in(memory, shapes, block_size=block_size, dtype=dtype),
        useful_blocks(
            max_num_seqs=limits.max_num_seqs,
            max_model_len=loaded.max_model_len,
            block_size=block_size,
        ),
    )


def _invariant_multiple(
    model: CausalModel,
    rehearsal: Rehearsal,
    limits: Limits,
    *,
    max_model_len: int,
    now: Callable[[], float] | None,
) -> int:
    started = now() if now is not None else 0.0
    try:
        multiple = invariant_multiple(
            model,
            rehearsal,
            max_model_len=max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
    except NotInvariant as reason:
        raise ModelRefused(f"deterministic cannot be promised here: {reason}") from reason
    logger.info(
        "deterministic: %s with rows in multiples of %d; checked in %s seconds",
        model.name,
        multiple,
        "an unknown number of" if now is None else f"{now() - started:.2f}",
    )
    return multiple


def _fingerprint(
    loaded: LoadedModel, model: CausalModel, backend: AttentionBackend, multiple: int
) -> str:
    parts = [loaded.fingerprint, model.name, backend.name, loaded.model.device.type]
    return "-".join(parts if multiple == 1 else [*parts, f"multiples-of-{multiple}"])
