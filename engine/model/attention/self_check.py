"""Start-up test of an attention backend on this very machine. Knows no model but its shapes.

A backend is trusted because it agrees with `reference` on the shapes that have gone wrong
elsewhere: mixed query lengths, ragged last blocks, scattered block ids, grouped heads, windows.
Never because of a version number.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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

#: (query length, context length): decodes and chunks in one step, short of, at and past a block's
#: end.
CHECKED_ROWS = ((1, 1), (5, 5), (1, 33), (7, 40), (1, 16), (3, 48), (1, 130), (20, 20))
#: Decodes alone, two of them longer than what is attended in one run.
CHECKED_DECODES = ((1, 1), (1, 33), (1, 700), (1, 16), (1, 2600), (1, 129))
#: Largest accepted error, as `worst_error` counts it, by the bits of the type's mantissa.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
#: What a model that is not known yet may ask for.
ANY_NEEDS = AttentionNeeds(
    heads=6, kv_heads=2, key_dim=64, value_dim=64, has_window=True, has_softcap=True
)
#: What libraries raise for a shape, a type or a device that they do not take.
_REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError, AttentionUnavailable)


class AttentionCheckFailed(RuntimeError):
    """The backend computes something else than the reference on this machine."""


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
        AttentionCheckFailed: naming the backend and the kind of batch.
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
    for window, softcap in _options(needs):

        def attend(
            one: AttentionBackend, window: int | None = window, softcap: float | None = softcap
        ) -> torch.Tensor:
            with torch.inference_mode():
                return one.prepare(metadata)(
                    query,
                    key_cache,
                    value_cache,
                    scaling=needs.key_dim**-0.5,
                    sliding_window=window,
                    softcap=softcap,
                ).float()

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
                f"(window {window}, softcap {softcap})"
            )


def worst_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of any one token and head of [tokens, heads, dim], relative to its norm.

    Not to the largest value of all alone: the average of many values is small, so that whatever
    went wrong in a long context would pass for rounding beside a short one. But a single value
    that is far off does not hide in the norm of its row either: the worse of the two counts.
    """
    errors = found - expected
    by_row = (errors.norm(dim=-1) / expected.norm(dim=-1)).max()
    return float(torch.maximum(by_row, errors.abs().max() / expected.abs().max()))


@dataclass(frozen=True, slots=True)
class DecodesOnly:
    """A decode attention as a backend, for steps in which every row has one token."""

    decode: DecodeAttention
    block_multiple: int = 1
    reads_unwritten_slots: bool = False

    @property
    def name(self) -> str:
        return self.decode.name

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        assert (metadata.query_lens == 1).all()
        return self.decode.plan_decodes(
            torch.from_numpy(metadata.context_lens.astype(np.int32)).to(metadata.device),
            torch.from_numpy(metadata.block_tables.astype(np.int32)).to(metadata.device),
            max_context=int(metadata.context_lens.max()),
        )


def _spoil_unwritten(cache: torch.Tensor, metadata: AttentionMetadata) -> None:
    """What is behind a context in its last block is no number."""
    last = (metadata.context_lens - 1) // metadata.block_size
    ends = metadata.context_lens - last * metadata.block_size
    rows = range(metadata.num_rows)
    for block, end in zip(metadata.block_tables[rows, last].tolist(), ends.tolist(), strict=True):
        cache[block, :, end:] = torch.nan


def _options(needs: AttentionNeeds) -> Iterator[tuple[int | None, float | None]]:
    """(window, softcap) of the compared calls."""
    yield None, None
    if needs.has_window:
        yield 9, None
    if needs.has_softcap:
        yield None, 20.0


def _metadata(
    rows: tuple[tuple[int, int], ...], block_size: int, device: torch.device
) -> tuple[AttentionMetadata, int]:
    """The rows over block ids in no order; also the number of blocks they need."""
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
