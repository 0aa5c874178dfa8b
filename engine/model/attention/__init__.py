"""Paged attention behind one function. Knows no model.

    reference      one request at a time, any device; the oracle
    single-token   one token at a time, any device; no token depends on another's company
    cpu            batched torch operations; made for a CPU, runs anywhere
    cuda           torch's flash attention over packed rows, read from their pages
    cuda-gathered  the same over gathered keys, where torch cannot read pages
    triton         decodes alone, split over their keys; for captured steps

Every backend passes the same suite of tests, and `self_check` on the machine it is about to serve.
"""

import logging
from collections.abc import Callable, Iterator

import torch

from engine.model.attention.cpu import CpuAttention
from engine.model.attention.cuda import CudaAttention
from engine.model.attention.gathered import GatheredAttention
from engine.model.attention.interface import (
    AttentionBackend,
    AttentionNeeds,
    AttentionUnavailable,
    DecodeAttention,
)
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.self_check import (
    ANY_NEEDS,
    CHECKED_DECODES,
    AttentionCheckFailed,
    DecodesOnly,
    self_check,
)
from engine.model.attention.single_token import SingleTokenAttention
from engine.model.attention.triton_decode import TritonDecode

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "cuda": CudaAttention,
    "cuda-gathered": GatheredAttention,
    "cpu": CpuAttention,
    "reference": ReferenceAttention,
    "single-token": SingleTokenAttention,
}
#: What "auto" tries on a kind of device, in this order.
AUTOMATIC = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "cuda-gathered", "cpu", "reference")}
#: The same with `deterministic`, where a token's result must not depend on its neighbours.
DETERMINISTIC = {"cpu": ("single-token",), "cuda": ("cuda", "cuda-gathered", "single-token")}
#: Attention of captured steps in order of preference: the first splits long rows.
DECODES: tuple[Callable[[], DecodeAttention], ...] = (TritonDecode, CudaAttention)

logger = logging.getLogger(__name__)


def choose_backend(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    block_size: int,
    needs: AttentionNeeds = ANY_NEEDS,
    deterministic: bool = False,
) -> tuple[AttentionBackend, int]:
    """The backend called `name`, checked on this machine, and the block size it works with.

    "auto" is the fastest one that passes. The block size is the one asked for, or else the next
    multiple of what the backend needs.

    Raises:
        ValueError: no backend has this name.
        AttentionCheckFailed: the one asked for fails, or all do.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is not one of auto, {', '.join(BACKENDS)}")
    automatic = (DETERMINISTIC if deterministic else AUTOMATIC)[torch.device(device).type]
    failure: AttentionCheckFailed | None = None
    for candidate in automatic if name == "auto" else (name,):
        try:
            backend = BACKENDS[candidate]()
        except AttentionUnavailable as reason:
            failure = AttentionCheckFailed(f"attention backend {candidate!r}: {reason}")
            logger.warning("%s", failure)
            continue
        for size in _block_sizes(backend, block_size):
            try:
                self_check(backend, dtype=dtype, device=device, block_size=size, needs=needs)
            except AttentionCheckFailed as reason:
                failure = reason
                logger.warning("%s; blocks of %d tokens", reason, size)
            else:
                return backend, size
    assert failure is not None
    raise failure


def choose_decode(
    *, dtype: torch.dtype, device: torch.device | str, block_size: int, needs: AttentionNeeds
) -> DecodeAttention | None:
    """The first of `DECODES` that works here; None when none does."""
    for make in DECODES:
        try:
            decode = make()
            self_check(
                DecodesOnly(decode),
                dtype=dtype,
                device=device,
                block_size=block_size,
                needs=needs,
                rows=CHECKED_DECODES,
            )
        except (AttentionUnavailable, AttentionCheckFailed) as reason:
            logger.warning("one attention of captured steps is left out: %s", reason)
        else:
            return decode
    return None


def _block_sizes(backend: AttentionBackend, block_size: int) -> Iterator[int]:
    yield block_size
    multiple = backend.block_multiple
    if block_size % multiple:
        yield -(-block_size // multiple) * multiple
