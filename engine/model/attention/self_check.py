"""Start-up test of an attention backend on this machine. Knows only the shapes of a model.

A backend is trusted only if it agrees with `reference` on cases that have failed in other systems:
mixed query lengths, partly filled last blocks, scattered block ids, grouped heads, windows. It is
never trusted because of a version number.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.model.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    AttentionNeeds,
    AttentionUnavailable,
    DecodeAttention,
    StepAttention,
)
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.split import plan_rows

#: (query length, context length): decodes and chunks in one step, with contexts that end before, at
#: and after the end of a block.
CHECKED_ROWS = ((1, 1), (5, 5), (1, 33), (7, 40), (1, 16), (3, 48), (1, 130), (20, 20))
#: Decodes alone; two contexts are longer than one split.
CHECKED_DECODES = ((1, 1), (1, 33), (1, 700), (1, 16), (1, 2600), (1, 129))
#: Largest accepted `worst_error`, which depends on the mantissa bits of the type.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
#: Needs for a check without a model.
ANY_NEEDS = AttentionNeeds(
    heads=6,
    kv_heads=2,
    key_dim=64,
    value_dim=64,
    has_window=True,
    has_softcap=True,
    has_sinks=True,
)
#: Exceptions of libraries for unsupported shapes, types or devices.
_REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError, AttentionUnavailable)


class AttentionCheckFailed(RuntimeError):
    """The backend does not agree with the reference on this machine, or does not work."""


def self_check(
    backend: AttentionBackend,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    block_size: int = 16,
    needs: AttentionNeeds = ANY_NEEDS,
    rows: tuple[tuple[int, int], ...] = CHECKED_ROWS,
) -> None:
    """Compare `backend` with the reference on a mixed batch; takes some milliseconds.

    Raises:
        AttentionCheckFailed: the message names the backend and the options.
    """
    generator = torch.Generator().manual_seed(0)
    metadata, num_blocks = _metadata(rows, block_size, torch.device(device))
    num_tokens = int(metadata.query_lens.sum())

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    query = random(num_tokens, needs.heads, needs.key_dim)
    key_cache = random(num_blocks, needs.kv_heads, block_size, needs.key_dim)
    value_cache = random(num_blocks, needs.kv_heads, block_size, needs.value_dim)
    if not backend.reads_unwritten_slots:
        for cache in (key_cache, value_cache):
            _spoil_unwritten(cache, metadata)
    sinks = random(needs.heads)
    for window, softcap, has_sinks in _options(needs):
        options = {
            "sliding_window": window,
            "softcap": softcap,
            "sinks": sinks if has_sinks else None,
        }

        def attend(one: AttentionBackend, options: dict[str, Any] = options) -> torch.Tensor:
            with torch.inference_mode():
                step = one.prepare(metadata)
                scaling = needs.key_dim**-0.5
                return step(query, key_cache, value_cache, scaling=scaling, **options).float()

        expected = attend(ReferenceAttention())
        try:
            found = attend(backend)
        except _REFUSALS as reason:
            raise AttentionCheckFailed(
                f"attention backend {backend.name!r} does not work in {dtype} on {device}: {reason}"
            ) from reason
        error = worst_error(found, expected)
        if not error <= TOLERANCES[dtype]:
            raise AttentionCheckFailed(
                f"attention backend {backend.name!r} is off by {error:.1e} in {dtype} on {device} "
                f"(window {window}, softcap {softcap}, {'with' if has_sinks else 'no'} sinks)"
            )


def worst_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error in [tokens, heads, dim] by two measures; the worse one counts.

    First, the error of each token and head relative to its own norm: outputs of long contexts are
    averages of many values and therefore small, so relative to the largest value of all outputs,
    an error in them would look like rounding. Second, the error of each value relative to the
    largest value of all outputs: so that one wrong value is not hidden by the norm of its row.
    """
    errors = found - expected
    by_row = (errors.norm(dim=-1) / expected.norm(dim=-1)).max()
    return float(torch.maximum(by_row, errors.abs().max() / expected.abs().max()))


@dataclass(frozen=True, slots=True)
class DecodesOnly:
    """A decode attention as a backend, for steps in which every row has one token."""

    decode: DecodeAttention
    reads_unwritten_slots: bool = False

    @property
    def name(self) -> str:
        return self.decode.name

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        return plan_rows(self.decode, metadata)


def _spoil_unwritten(cache: torch.Tensor, metadata: AttentionMetadata) -> None:
    """Fill the slots after each context, in its last block, with NaN."""
    last = (metadata.context_lens - 1) // metadata.block_size
    ends = metadata.context_lens - last * metadata.block_size
    rows = range(metadata.num_rows)
    for block, end in zip(metadata.block_tables[rows, last].tolist(), ends.tolist(), strict=True):
        cache[block, :, end:] = torch.nan


def _options(needs: AttentionNeeds) -> Iterator[tuple[int | None, float | None, bool]]:
    """The combinations of window, softcap and sinks to compare."""
    yield None, None, False
    if needs.has_window:
        yield 9, None, False
    if needs.has_softcap:
        yield None, 20.0, False
    if needs.has_sinks:
        yield None, None, True
        if needs.has_window:
            yield 9, None, True


def _metadata(
    rows: tuple[tuple[int, int], ...], block_size: int, device: torch.device
) -> tuple[AttentionMetadata, int]:
    """The metadata of the rows, with shuffled block ids, and the number of blocks."""
    query_lens, context_lens = np.array(rows, dtype=np.int64).T
    sizes = -(-context_lens // block_size)
    ids = np.random.default_rng(0).permutation(int(sizes.sum()))
    tables = np.zeros((len(sizes), int(sizes.max())), dtype=np.int64)
    for row, (size, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
        own = ids[end - size : end]
        tables[row] = np.resize(own, tables.shape[1])
    metadata = AttentionMetadata(
        block_size=block_size,
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=tables,
        device=device,
    )
    return metadata, len(ids)
