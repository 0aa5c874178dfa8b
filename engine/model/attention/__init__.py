"""Paged attention behind one function. Knows no model.

    reference      one request at a time, any device; the oracle
    single-token   one token at a time, any device; no token depends on another's company
    cpu            batched torch operations

Every backend passes the same suite of tests, and `self_check` on the machine it is about to serve.
"""

import logging
from collections.abc import Callable

import torch

from engine.model.attention.cpu import CpuAttention
from engine.model.attention.interface import AttentionBackend
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.self_check import AttentionCheckFailed, self_check
from engine.model.attention.single_token import SingleTokenAttention

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "cpu": CpuAttention,
    "reference": ReferenceAttention,
    "single-token": SingleTokenAttention,
}
#: What "auto" tries, in this order; and what it tries where tokens may not depend on each other.
AUTOMATIC = ("cpu", "reference")
DETERMINISTIC = ("single-token",)

logger = logging.getLogger(__name__)


def choose_backend(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    block_size: int,
    deterministic: bool = False,
) -> AttentionBackend:
    """The backend called `name`, checked on this machine; "auto" is the fastest one that passes.

    Raises:
        ValueError: no backend has this name.
        AttentionCheckFailed: the one asked for fails, or all do.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is not one of auto, {', '.join(BACKENDS)}")
    automatic = DETERMINISTIC if deterministic else AUTOMATIC
    candidates = automatic if name == "auto" else (name,)
    for candidate in candidates:
        backend = BACKENDS[candidate]()
        try:
            self_check(backend, dtype=dtype, device=device, block_size=block_size)
        except AttentionCheckFailed as failure:
            if candidate == candidates[-1]:
                raise
            logger.warning("%s; trying the next backend", failure)
        else:
            return backend
    raise AssertionError("a candidate is returned or raises")
