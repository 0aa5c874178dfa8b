"""A Batch's rows as the flat tensors of one step. Knows no model.

Everything is laid out with numpy on the host and becomes a tensor once; on a CPU without a copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from engine.batch import NO_DECODES, UNKNOWN_TOKEN, BatchRow, DecodeRows
from engine.model.attention.interface import AttentionBackend, AttentionMetadata, IntArray
from engine.model.causal_model import AdaptedTokens, CausalModel, StepInputs
from engine.model.device.kv_pool import KVPool, Slots
from engine.model.device.transfer import to_device


@dataclass(frozen=True, slots=True)
class Fed:
    """Tokens that the step in flight chooses and that the host does not know yet.

    Args:
        tokens: on the device, one for each of its `due`; negative where there is none.
        sources: [decodes], the index in `tokens` of each decode's token; -1 where it is known.
    """

    tokens: torch.Tensor
    sources: IntArray

    def put_into(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`token_ids` with the unknown ones filled in; the decodes come first."""
        count = len(self.sources)
        sources = to_device(self.sources, token_ids.device)
        # A row without a token has failed: what is computed for it now is dropped, but the model
        # needs a valid id.
        tokens = self.tokens[sources.clamp(min=0)].clamp_(min=0)
        decodes = torch.where(sources >= 0, tokens, token_ids[:count])
        return torch.cat((decodes, token_ids[count:]))


@dataclass(frozen=True, slots=True)
class HostStep:
    """One step as arrays on the host, rows one after the other; [tokens] unless said otherwise.

    Args:
        token_ids: what is computed.
        positions: each token's place in its own request.
        blocks, offsets: the slot where its key and value go.
        logit_rows: [tokens to choose], indices of the tokens whose logits are wanted.
        fed: where the unknown tokens come from; None if all are known.
        adapted: indices of the tokens of each adapter in the step.
    """

    token_ids: IntArray
    positions: IntArray
    blocks: IntArray
    offsets: IntArray
    logit_rows: IntArray
    metadata: AttentionMetadata
    fed: Fed | None = None
    adapted: Mapping[str, IntArray] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def begun_blocks(self) -> IntArray:
        """Blocks of which this step writes the first slot, but not the last."""
        metadata = self.metadata
        last = (metadata.context_lens - 1) // metadata.block_size
        begun = last * metadata.block_size >= metadata.starts
        partial = metadata.context_lens % metadata.block_size != 0
        rows = np.flatnonzero(begun & partial)
        return metadata.block_tables[rows, last[rows]]

    def inputs(self, backend: AttentionBackend) -> StepInputs:
        """The same as tensors on the device, and the step's attention."""
        device = self.metadata.device
        token_ids, positions, blocks, offsets, logit_rows = (
            to_device(array, device)
            for array in (
                self.token_ids,
                self.positions,
                self.blocks,
                self.offsets,
                self.logit_rows,
            )
        )
        return StepInputs(
            token_ids=token_ids if self.fed is None else self.fed.put_into(token_ids),
            positions=positions,
            slots=Slots(blocks, offsets),
            logit_rows=logit_rows,
            metadata=self.metadata,
            attention=backend.prepare(self.metadata),
            adapted=[
                AdaptedTokens(name, to_device(tokens, device))
                for name, tokens in self.adapted.items()
            ],
        )


class CapturedSteps(Protocol):
    """Steps that were recorded once and are replayed; see `engine.model.run.graphs`."""

    def accepts(self, step: HostStep) -> bool:
        """Whether one of them can compute `step`."""
        ...

    def run(self, step: HostStep) -> torch.Tensor:
        """The step's logits."""
        ...


def lay_out(
    rows: Sequence[BatchRow],
    *,
    block_size: int,
    device: torch.device,
    decodes: DecodeRows = NO_DECODES,
    fed: Fed | None = None,
) -> HostStep:
    """The step over `decodes` and then `rows`; `device` is where the model and the cache are."""
    num_rows = len(decodes) + len(rows)
    assert num_rows
    assert decodes.block_size == block_size or not len(decodes)
    if not rows:
        return _lay_out_decodes(decodes, device, fed)
    query_lens = np.ones(num_rows, dtype=np.int64)
    query_lens[len(decodes) :] = [len(row.token_ids) for row in rows]
    starts = _append(decodes.starts, [row.start for row in rows])
    metadata = AttentionMetadata(
        block_size=block_size,
        query_lens=query_lens,
        context_lens=starts + query_lens,
        block_tables=_block_tables(rows, decodes, block_size),
        device=device,
    )
    num_tokens = int(query_lens.sum())
    row_of_token = np.repeat(np.arange(num_rows), query_lens)
    names = [request.adapter for request in decodes.requests] + [row.adapter for row in rows]
    positions = np.arange(num_tokens) + np.repeat(starts - metadata.offsets, query_lens)
    num_due = np.ones(num_rows, dtype=np.int64)
    num_due[len(decodes) :] = [(1 + row.num_drafted) * row.samples for row in rows]
    # The last tokens of each row, as many as it has tokens to choose.
    from_end = np.repeat(num_due.cumsum(), num_due) - np.arange(num_due.sum())
    return HostStep(
        token_ids=_append(decodes.token_ids, list(chain.from_iterable(r.token_ids for r in rows))),
        positions=positions,
        blocks=metadata.block_tables[row_of_token, positions // block_size],
        offsets=positions % block_size,
        logit_rows=np.repeat(metadata.offsets + query_lens, num_due) - from_end,
        metadata=metadata,
        fed=fed,
        adapted=_adapted(names, metadata.offsets, query_lens),
    )


def feed_of(decodes: DecodeRows, due_ids: Sequence[str], tokens: torch.Tensor) -> Fed | None:
    """The unknown tokens of `decodes`, out of the `tokens` of a step that was due for `due_ids`."""
    unknown = decodes.token_ids == UNKNOWN_TOKEN
    if not unknown.any():
        return None
    place_of = {request_id: place for place, request_id in enumerate(due_ids)}
    sources = [place_of.get(request.request_id, -1) for request in decodes.requests]
    return Fed(tokens, np.where(unknown, sources, -1))


def with_all_logits(step: HostStep) -> HostStep:
    """The same step, with the logits of every token."""
    return replace(step, logit_rows=np.arange(step.num_tokens))


def pad(step: HostStep, *, multiple: int, spare_block: int) -> HostStep:
    """The same step with tokens and logits padded to multiples of `multiple`.

    The padding is rows of one token at position 0 of `spare_block`, which no request owns: all of
    them write the same there. The real logits come first, in their order.
    """
    metadata = step.metadata
    more = -step.num_tokens % multiple
    ones, zeros = np.ones(more, dtype=np.int64), np.zeros(more, dtype=np.int64)
    tables = np.zeros((more, metadata.block_tables.shape[1]), dtype=np.int64)
    tables[:, 0] = spare_block
    more_logits = np.zeros(-len(step.logit_rows) % multiple, dtype=np.int64)
    return HostStep(
        token_ids=np.concatenate((step.token_ids, zeros)),
        positions=np.concatenate((step.positions, zeros)),
        blocks=np.concatenate((step.blocks, zeros + spare_block)),
        offsets=np.concatenate((step.offsets, zeros)),
        logit_rows=np.concatenate((step.logit_rows, more_logits)),
        metadata=replace(
            metadata,
            query_lens=np.concatenate((metadata.query_lens, ones)),
            context_lens=np.concatenate((metadata.context_lens, ones)),
            block_tables=np.concatenate((metadata.block_tables, tables)),
        ),
        fed=step.fed,
        adapted=step.adapted,
    )


def compute_logits(
    step: HostStep,
    *,
    model: CausalModel,
    kv_pool: KVPool,
    backend: AttentionBackend,
    multiple: int = 1,
    graphs: CapturedSteps | None = None,
) -> torch.Tensor:
    """Write the step's keys and values to the pool; returns [tokens to choose, width of logits].

    If model and backend read slots that were never written, a block is cleared by the step that
    writes its first slot but not its last: what an earlier owner left in it is then gone before it
    is read. Otherwise clearing would only add two kernels per layer to most steps.

    A step that `graphs` accept is replayed; its logits are then valid until the next step.
    Tokens and logits are computed in multiples of `multiple`; above 1 the pool needs a spare block.
    """
    num_logits = len(step.logit_rows)
    if reads_unwritten_slots(model, backend) and len(begun := step.begun_blocks):
        kv_pool.clear(to_device(begun, step.metadata.device))
    if graphs is not None and graphs.accepts(step):
        return graphs.run(step)
    if multiple == 1:
        return model.forward(step.inputs(backend), kv_pool)
    step = pad(step, multiple=multiple, spare_block=kv_pool.spare_block)
    return model.forward(step.inputs(backend), kv_pool)[:num_logits]


def reads_unwritten_slots(model: CausalModel, backend: AttentionBackend) -> bool:
    """Whether slots that were never written must hold finite numbers."""
    return model.reads_unwritten_slots and backend.reads_unwritten_slots


def _lay_out_decodes(decodes: DecodeRows, device: torch.device, fed: Fed | None) -> HostStep:
    """`lay_out` for decodes alone, whose columns are nearly laid out: most steps are like this."""
    starts, tables = decodes.starts, np.ascontiguousarray(decodes.block_tables)
    rows, ones = np.arange(len(decodes)), np.ones(len(decodes), dtype=np.int64)
    return HostStep(
        token_ids=decodes.token_ids,
        positions=starts,
        blocks=tables[rows, starts // decodes.block_size],
        offsets=starts % decodes.block_size,
        logit_rows=rows,
        metadata=AttentionMetadata(decodes.block_size, ones, starts + 1, tables, device),
        fed=fed,
        adapted=_adapted([request.adapter for request in decodes.requests], rows, ones),
    )


def _adapted(
    names: Sequence[str | None], offsets: IntArray, query_lens: IntArray
) -> dict[str, IntArray]:
    """The indices of each adapter's tokens, in order; `offsets` are of the rows' first tokens."""
    if names.count(None) == len(names):
        return {}
    tokens: dict[str, list[IntArray]] = {}
    for name, first, count in zip(names, offsets.tolist(), query_lens.tolist(), strict=True):
        if name is not None:
            tokens.setdefault(name, []).append(np.arange(first, first + count))
    return {name: np.concatenate(parts) for name, parts in tokens.items()}


def _block_tables(rows: Sequence[BatchRow], decodes: DecodeRows, block_size: int) -> IntArray:
    """[decodes and rows, most blocks], the part of each table that the step's context reaches."""
    sizes = [-(-row.end // block_size) for row in rows]
    width = max((decodes.block_tables.shape[1], *sizes))
    tables = np.zeros((len(decodes) + len(rows), width), dtype=np.int64)
    tables[: len(decodes), : decodes.block_tables.shape[1]] = decodes.block_tables
    for table, row, size in zip(tables[len(decodes) :], rows, sizes, strict=True):
        assert len(row.block_ids) >= size, f"{row.request_id} has too few blocks"
        table[:size] = row.block_ids[:size]
    return tables


def _append(column: IntArray, values: list[int]) -> IntArray:
    return np.concatenate((column, np.array(values, dtype=np.int64))) if values else column
