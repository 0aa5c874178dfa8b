"""Start-up test of an attention backend on this very machine. Knows no model.

A backend is trusted because it agrees with `reference` on the shapes that have gone wrong
elsewhere: mixed query lengths, ragged last blocks, scattered block ids, grouped heads, windows.
Never because of a version number.
"""

import numpy as np
import torch

from engine.model.attention.interface import AttentionBackend, AttentionMetadata
from engine.model.attention.reference import ReferenceAttention

#: (query length, context length): decodes and chunks in one step, short of, at and past a block's
#: end.
CHECKED_ROWS = ((1, 1), (5, 5), (1, 33), (7, 40), (1, 16), (3, 48), (1, 130), (20, 20))
#: Largest accepted error relative to the largest value, by the bits of the type's mantissa.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}


class AttentionCheckFailed(RuntimeError):
    """The backend computes something else than the reference on this machine."""


def self_check(
    backend: AttentionBackend,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    block_size: int = 16,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
) -> None:
    """Compare `backend` with the reference on mixed batches; takes some milliseconds.

    Raises:
        AttentionCheckFailed: naming the backend and the kind of batch.
    """
    generator = torch.Generator().manual_seed(0)
    metadata, num_blocks = _metadata(block_size, torch.device(device))
    num_tokens = int(metadata.query_lens.sum())

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    query = random(num_tokens, heads, head_dim)
    key_cache = random(num_blocks, kv_heads, block_size, head_dim)
    value_cache = random(num_blocks, kv_heads, block_size, head_dim)
    for window, softcap in ((None, None), (9, None), (None, 20.0)):
        with torch.inference_mode():
            expected, found = (
                one.prepare(metadata)(
                    query,
                    key_cache,
                    value_cache,
                    scaling=head_dim**-0.5,
                    sliding_window=window,
                    softcap=softcap,
                ).float()
                for one in (ReferenceAttention(), backend)
            )
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error <= TOLERANCES[dtype]:
            raise AttentionCheckFailed(
                f"attention backend {backend.name!r} is off by {error:.1e} in {dtype} on {device} "
                f"(window {window}, softcap {softcap})"
            )


def _metadata(block_size: int, device: torch.device) -> tuple[AttentionMetadata, int]:
    """Rows of `CHECKED_ROWS` over block ids in no order; also the number of blocks they need."""
    query_lens, context_lens = np.array(CHECKED_ROWS, dtype=np.int64).T
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
