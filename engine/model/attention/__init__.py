"""Paged attention behind one function. Knows no model.

    reference      one request at a time, any device; the oracle of the others
    single-token   one token at a time, any device; independent of the other tokens of a step
    cpu            batched torch operations; made for a CPU, runs on any device
    cuda           torch's flash attention over packed rows, reads the blocks directly
    cuda-gathered  the same over gathered keys, for releases of torch that cannot read blocks
    triton         only decodes, split over their keys (flash decoding)

On CUDA, rows of one token use `triton` in every step, and a backend computes the longer rows.

Every backend must pass the same test suite, and `self_check` on the machine on which it serves.
"""

import logging
from collections.abc import Callable

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
#: The backends that "auto" tries on each type of device, in this order.
AUTOMATIC = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "cuda-gathered", "cpu", "reference")}
#: The same for `deterministic`, where a token's result must not depend on other tokens.
DETERMINISTIC = {"cpu": ("single-token",), "cuda": ("cuda", "cuda-gathered", "single-token")}
#: Attention of rows of one token on each type of device, in order of preference. The first one
#: splits long rows. On a CPU the backends are as fast.
DECODES: dict[str, tuple[Callable[[], DecodeAttention], ...]] = {
    "cpu": (),
    "cuda": (TritonDecode, CudaAttention),
}

logger = logging.getLogger(__name__)


def choose_backend(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    block_size: int,
    needs: AttentionNeeds = ANY_NEEDS,
    deterministic: bool = False,
) -> AttentionBackend:
    """The backend with this name, checked on this machine; "auto" is the fastest that passes.

    Raises:
        ValueError: no backend has this name.
        AttentionCheckFailed: the named backend fails; for "auto", all backends fail.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is not one of auto, {', '.join(BACKENDS)}")
    automatic = (DETERMINISTIC if deterministic else AUTOMATIC)[torch.device(device).type]
    failure: AttentionCheckFailed | None = None
    for candidate in automatic if name == "auto" else (name,):
        try:
            backend = BACKENDS[candidate]()
            self_check(backend, dtype=dtype, device=device, block_size=block_size, needs=needs)
        except AttentionUnavailable as reason:
            failure = AttentionCheckFailed(f"attention backend {candidate!r}: {reason}")
        except AttentionCheckFailed as reason:
            failure = reason
        else:
            return backend
        logger.warning("%s; blocks of %d tokens", failure, block_size)
    assert failure is not None
    raise failure


def choose_decode(
    *, dtype: torch.dtype, device: torch.device | str, block_size: int, needs: AttentionNeeds
) -> DecodeAttention | None:
    """The first of `DECODES` that works on this device; None if there is none."""
    for make in DECODES[torch.device(device).type]:
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
            logger.warning("an attention for decodes cannot be used: %s", reason)
        else:
            return decode
    return None
