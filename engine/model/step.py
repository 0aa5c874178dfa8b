"""A Batch's rows as the flat tensors of one step. Knows no model.

Everything is laid out with numpy on the host and becomes a tensor once, without a copy on a CPU.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from engine.batch import BatchRow
from engine.model.attention.interface import AttentionBackend, AttentionMetadata, IntArray
from engine.model.causal_model import StepInputs
from engine.model.kv_pool import Slots


def build_step(
    rows: Sequence[BatchRow],
    *,
    block_size: int,
    backend: AttentionBackend,
    device: torch.device,
) -> tuple[StepInputs, torch.Tensor]:
    """The inputs of one step over `rows`, and the ids of the blocks to clear before it.

    A block is cleared by the step that writes its first slot but not its last: whatever an earlier
    owner left in the slots between is then gone before anyone reads the block.
    """
    assert rows
    query_lens = np.fromiter((len(row.token_ids) for row in rows), dtype=np.int64)
    context_lens = np.fromiter((row.end for row in rows), dtype=np.int64)
    metadata = AttentionMetadata(
        block_size=block_size,
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=_block_tables(rows, context_lens, block_size),
        device=device,
    )
    num_tokens = int(query_lens.sum())
    row_of_token = np.repeat(np.arange(len(rows)), query_lens)
    positions = np.arange(num_tokens) + np.repeat(metadata.starts - metadata.offsets, query_lens)
    token_ids = np.fromiter(
        chain.from_iterable(row.token_ids for row in rows), dtype=np.int64, count=num_tokens
    )
    blocks = metadata.block_tables[row_of_token, positions // block_size]
    samples = np.fromiter((row.samples for row in rows), dtype=np.bool_)
    logit_rows = (metadata.offsets + query_lens - 1)[samples]

    def tensor(array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    inputs = StepInputs(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        slots=Slots(tensor(blocks), tensor(positions % block_size)),
        logit_rows=tensor(logit_rows),
        metadata=metadata,
        attention=backend.prepare(metadata),
    )
    return inputs, tensor(_begun_blocks(metadata))


def _block_tables(rows: Sequence[BatchRow], context_lens: IntArray, block_size: int) -> IntArray:
    """[rows, most blocks], the part of each table that the step's context reaches."""
    sizes = (context_lens + block_size - 1) // block_size
    tables = np.zeros((len(rows), int(sizes.max())), dtype=np.int64)
    for table, row, size in zip(tables, rows, sizes.tolist(), strict=True):
        assert len(row.block_ids) >= size, f"{row.request_id} has too few blocks"
        table[:size] = row.block_ids[:size]
    return tables


def _begun_blocks(metadata: AttentionMetadata) -> IntArray:
    """Last blocks of rows that begin in this step and are not full after it."""
    last = (metadata.context_lens - 1) // metadata.block_size
    begun = last * metadata.block_size >= metadata.starts
    partial = metadata.context_lens % metadata.block_size != 0
    rows = np.flatnonzero(begun & partial)
    return metadata.block_tables[rows, last[rows]]
