"""Converts the rows of a Batch to the flat tensors of one step. Knows no model.

All arrays are built with numpy on the host, and each becomes a tensor once; on a CPU without a
copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from engine.batch import NO_DECODES, UNKNOWN_TOKEN, BatchRow, DecodeRows
from engine.cache.state_tags import Turn
from engine.model.attention.interface import AttentionBackend, AttentionMetadata, IntArray
from engine.model.causal_model import (
    AdaptedTokens,
    CausalModel,
    Chooser,
    PicturedRow,
    StepInputs,
)
from engine.model.device.kv_pool import KVPool, Slots
from engine.model.device.transfer import to_device
from engine.model.recurrence import RecurrentRows
from engine.request import NO_SLOT

_NO_ROWS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Fed:
    """Input tokens that the step in flight samples, so that the host does not know them yet.

    Args:
        tokens: on the device, one for each of that step's `due`; negative if sampling failed.
        sources: [decodes], the index in `tokens` of each decode's token; -1 if the host knows it.
    """

    tokens: torch.Tensor
    sources: IntArray

    def put_into(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`token_ids` with the unknown ones replaced; the decodes are the first of them."""
        count = len(self.sources)
        sources = to_device(self.sources, token_ids.device)
        # A negative token means that its row has failed. The result of that row is dropped, but the
        # model needs a valid id.
        tokens = self.tokens[sources.clamp(min=0)].clamp_(min=0)
        decodes = torch.where(sources >= 0, tokens, token_ids[:count])
        return torch.cat((decodes, token_ids[count:]))


@dataclass(frozen=True, slots=True)
class HostStep:
    """One step as arrays on the host, its rows concatenated; [tokens] unless stated otherwise.

    Args:
        token_ids: the tokens to compute.
        positions: the index of each token in its own request.
        blocks, offsets: the cache slot for each token's key and value.
        logit_rows: [tokens to sample + `num_scored`], indices of the tokens whose logits are
            needed: first those that sample, then those that score the token of a prompt.
        fed: the source of tokens that the host does not know yet; None if it knows all.
        adapted: for each adapter in the step, the indices of its tokens.
        pictured: the rows whose requests have pictures.
        state_slots: [rows], the slots of their recurrent states, `NO_SLOT` for padding.
    """

    token_ids: IntArray
    positions: IntArray
    blocks: IntArray
    offsets: IntArray
    logit_rows: IntArray
    metadata: AttentionMetadata
    fed: Fed | None = None
    adapted: Mapping[str, IntArray] = field(default_factory=dict)
    num_scored: int = 0
    pictured: Sequence[PicturedRow] = ()
    state_slots: IntArray = field(default_factory=lambda: _NO_ROWS)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def begun_blocks(self) -> IntArray:
        """The ids of blocks whose first slot this step writes, but not their last."""
        metadata = self.metadata
        last = (metadata.context_lens - 1) // metadata.block_size
        begun = last * metadata.block_size >= metadata.starts
        partial = metadata.context_lens % metadata.block_size != 0
        rows = np.flatnonzero(begun & partial)
        return metadata.block_tables[rows, last[rows]]

    def inputs(self, backend: AttentionBackend, turn: Turn | None = None) -> StepInputs:
        """The step as tensors on the device, with its planned attention.

        `turn` says where the recurrent states are, for a model that has some.
        """
        device, lens = self.metadata.device, self.metadata.query_lens
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
            pictured=self.pictured,
            recurrent=None if turn is None else RecurrentRows(lens, turn, device),
        )


class CapturedSteps(Protocol):
    """Captured steps that are replayed; see `engine.model.run.graphs`."""

    def accepts(self, step: HostStep) -> bool:
        """Whether a captured step can compute `step`."""
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
    """The step of `decodes`, followed by `rows`, for a model and a cache on `device`."""
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
    # The logits are those of a row's last tokens, as many as it has tokens to sample.
    from_end = np.repeat(num_due.cumsum(), num_due) - np.arange(num_due.sum())
    due_rows = np.repeat(metadata.offsets + query_lens, num_due) - from_end
    scored_rows = _scored_rows(rows, metadata.offsets[len(decodes) :])
    return HostStep(
        token_ids=_append(decodes.token_ids, list(chain.from_iterable(r.token_ids for r in rows))),
        positions=positions,
        blocks=metadata.block_tables[row_of_token, positions // block_size],
        offsets=positions % block_size,
        logit_rows=np.concatenate((due_rows, scored_rows)) if len(scored_rows) else due_rows,
        metadata=metadata,
        fed=fed,
        adapted=_adapted(names, metadata.offsets, query_lens),
        num_scored=len(scored_rows),
        pictured=[
            *_pictured_decodes(decodes),
            *(
                PicturedRow(first, row.start, row.end, row.pictures, row.prompt_token_ids)
                for first, row in zip(metadata.offsets[len(decodes) :].tolist(), rows, strict=True)
                if row.pictures
            ),
        ],
        state_slots=_state_slots(rows, decodes),
    )


def feed_of(decodes: DecodeRows, due_ids: Sequence[str], tokens: torch.Tensor) -> Fed | None:
    """The source of the unknown tokens of `decodes`: `tokens`, which a step samples for `due_ids`.

    None if the host knows all tokens.
    """
    unknown = decodes.token_ids == UNKNOWN_TOKEN
    if not unknown.any():
        return None
    index_of = {request_id: index for index, request_id in enumerate(due_ids)}
    sources = [index_of.get(request.request_id, -1) for request in decodes.requests]
    return Fed(tokens, np.where(unknown, sources, -1))


def with_all_logits(step: HostStep) -> HostStep:
    """The step with logits for every token, in the order of the tokens."""
    return replace(step, logit_rows=np.arange(step.num_tokens), num_scored=0)


def pad(step: HostStep, *, multiple: int, spare_block: int) -> HostStep:
    """The step with its tokens and logits padded to multiples of `multiple`.

    The padding consists of rows with one token at position 0 of `spare_block`, which no request
    owns; all of them write the same values there. The real logits come first, in their order.
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
        num_scored=step.num_scored,
        pictured=step.pictured,
        state_slots=np.concatenate((step.state_slots, zeros + NO_SLOT)),
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
    """Write the step's keys and values to the pool; return [logit rows, width of logits].

    If both model and backend read unwritten slots, the step that writes the first slot of a block,
    but not its last, clears the block first, so that values of an earlier owner are never read.
    Other models need no clearing, which would add two kernels per layer to most steps.

    A step that `graphs` accepts is replayed; its logits are then valid until the next step.
    Tokens and logits are padded to multiples of `multiple`; above 1 the pool needs a spare block.
    """
    num_logits = len(step.logit_rows)
    if reads_unwritten_slots(model, backend) and len(begun := step.begun_blocks):
        kv_pool.clear(to_device(begun, step.metadata.device))
    if graphs is not None and graphs.accepts(step):
        return graphs.run(step)
    if multiple > 1:
        step = pad(step, multiple=multiple, spare_block=kv_pool.spare_block)
    return _with_states(model.forward, step, kv_pool, backend)[:num_logits]


def choose_tokens(
    step: HostStep, *, model: Chooser, kv_pool: KVPool, backend: AttentionBackend
) -> torch.Tensor:
    """As `compute_logits`, but return what `Chooser.choose` does."""
    return _with_states(model.choose, step, kv_pool, backend)


def _with_states(
    compute: Callable[[StepInputs, KVPool], torch.Tensor],
    step: HostStep,
    kv_pool: KVPool,
    backend: AttentionBackend,
) -> torch.Tensor:
    """What `compute` returns; then the states that it has written may be read."""
    if kv_pool.states is None:
        return compute(step.inputs(backend), kv_pool)
    metadata = step.metadata
    turn = kv_pool.states.turn(step.state_slots, metadata.starts, metadata.context_lens)
    found = compute(step.inputs(backend, turn), kv_pool)
    kv_pool.states.commit(turn)
    return found


def reads_unwritten_slots(model: CausalModel, backend: AttentionBackend) -> bool:
    """Whether unwritten slots must contain finite numbers."""
    return model.reads_unwritten_slots and backend.reads_unwritten_slots


def _lay_out_decodes(decodes: DecodeRows, device: torch.device, fed: Fed | None) -> HostStep:
    """`lay_out` for decodes alone, as in most steps: their columns are nearly the arrays."""
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
        pictured=_pictured_decodes(decodes),
        state_slots=_state_slots((), decodes),
    )


def _pictured_decodes(decodes: DecodeRows) -> list[PicturedRow]:
    """The decodes, which are the step's first rows, of requests with pictures."""
    return [
        PicturedRow(index, start, start + 1, request.pictures, request.prompt_token_ids)
        for index, request in enumerate(decodes.requests)
        if request.pictures
        for start in (int(decodes.starts[index]),)
    ]


def _state_slots(rows: Sequence[BatchRow], decodes: DecodeRows) -> IntArray:
    """The slots of all rows; empty for a model without a recurrent state."""
    first = decodes.requests[0] if len(decodes) else rows[0]
    if first.state_slot == NO_SLOT:
        return _NO_ROWS
    slots = [request.state_slot for request in decodes.requests]
    return np.array(slots + [row.state_slot for row in rows], dtype=np.int64)


def _adapted(
    names: Sequence[str | None], offsets: IntArray, query_lens: IntArray
) -> dict[str, IntArray]:
    """The indices of each adapter's tokens, ascending; `offsets` are the rows' first tokens."""
    if names.count(None) == len(names):
        return {}
    tokens: dict[str, list[IntArray]] = {}
    for name, first, count in zip(names, offsets.tolist(), query_lens.tolist(), strict=True):
        if name is not None:
            tokens.setdefault(name, []).append(np.arange(first, first + count))
    return {name: np.concatenate(parts) for name, parts in tokens.items()}


def _scored_rows(rows: Sequence[BatchRow], offsets: IntArray) -> IntArray:
    """The indices of the tokens before the scored ones; `offsets` are those of the rows."""
    parts = [
        np.arange(scored.start - 1, scored.stop - 1) + (offset - row.start)
        for row, offset in zip(rows, offsets.tolist(), strict=True)
        if (scored := row.scored)
    ]
    return np.concatenate(parts) if parts else _NO_ROWS


def _block_tables(rows: Sequence[BatchRow], decodes: DecodeRows, block_size: int) -> IntArray:
    """[rows of the step, most blocks]: of each block table, the part that the step reads."""
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
