"""The Batch: the Scheduler's immutable plan for one step, and all a ModelRunner ever sees.

Knows no device. A row is a run of consecutive tokens of one request; a decode is a run of length
one and a prefill chunk a longer one: nothing else tells them apart. Those that had caught up come
as columns, because there may be a thousand of them in every step; the few others as records.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.request import Request
from engine.sampling_params import SamplingParams

IntArray = NDArray[np.int64]


class BlockCopy(NamedTuple):
    """Copy one block's K and V, all layers, bit for bit."""

    source: int
    destination: int


class BatchRow(NamedTuple):
    """The work of one request in this step.

    Tokens `token_ids` sit at positions `start .. start + len(token_ids) - 1`. Their K and V go to
    slot `block_ids[p // block_size] * block_size + p % block_size`, and each attends to positions
    0..p.

    `block_ids`, `prompt_token_ids` and `output_token_ids` are read-only views of live lists, valid
    for this step alone: copying a long table or history per step would cost more than the step's
    planning.

    `samples` says that the row's last token is the request's last known one, so its logits yield
    output number `len(output_token_ids)`; otherwise the row only fills the cache.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    samples: bool
    sampling: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]

    @property
    def end(self) -> int:
        """One past the last position; also the row's context length after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """The rows of requests that had caught up: one token each, and each is due the next one.

    Args:
        requests: the live records, to be read and never to be changed.
        token_ids: [rows], the last known token of each.
        starts: [rows], its position.
        block_tables: [rows, most blocks of any row]; of each row the blocks of positions
            `0 .. start`, what lies behind them may be anything.
        block_size: slots per block.
    """

    requests: Sequence[Request]
    token_ids: IntArray
    starts: IntArray
    block_tables: IntArray
    block_size: int

    def __len__(self) -> int:
        return len(self.requests)

    def as_rows(self) -> list[BatchRow]:
        """The same as records."""
        return [
            BatchRow(
                request_id=request.request_id,
                token_ids=(token_id,),
                start=start,
                block_ids=table[: start // self.block_size + 1].tolist(),
                samples=True,
                sampling=request.sampling,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=request.output_token_ids,
            )
            for request, token_id, start, table in zip(
                self.requests,
                self.token_ids.tolist(),
                self.starts.tolist(),
                self.block_tables,
                strict=True,
            )
        ]


_NOTHING = np.zeros(0, dtype=np.int64)
NO_DECODES = DecodeRows((), _NOTHING, _NOTHING, np.zeros((0, 0), dtype=np.int64), block_size=1)


@dataclass(frozen=True, slots=True)
class Batch:
    """The plan of one step.

    The runner does swap_out, then swap_in, then computes the rows, in this order: a block may be
    swapped out and handed to another request within the same step.

    swap_out: device block -> host block; swap_in: host block -> device block. The rows are the
    decodes and then the others, which may have one token as well.
    """

    step: int
    decodes: DecodeRows = NO_DECODES
    catch_up_rows: tuple[BatchRow, ...] = ()
    swap_out: tuple[BlockCopy, ...] = ()
    swap_in: tuple[BlockCopy, ...] = ()

    @property
    def rows(self) -> tuple[BatchRow, ...]:
        """All rows as records, made anew with every look."""
        return (*self.decodes.as_rows(), *self.catch_up_rows)

    @property
    def due(self) -> list[Request | BatchRow]:
        """Those whose next token the step yields, in the order of the rows."""
        return [*self.decodes.requests, *(row for row in self.catch_up_rows if row.samples)]

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.catch_up_rows)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(len(row.token_ids) for row in self.catch_up_rows)

    @property
    def is_empty(self) -> bool:
        return not (self.num_rows or self.swap_out or self.swap_in)


class ModelRunner(Protocol):
    """Executes a Batch on a device.

    Stateless but for the KV pool: running the same rows twice gives the same tokens.

    Raises:
        DeviceFailed: nothing the device says can be trusted any more, or a swap failed half-way.
        Exception: the rows failed, after the swaps were done; the engine finds the culprit by
            running the rows one by one, without the swaps.
    """

    def run(self, batch: Batch) -> dict[str, int]:
        """Next token id of every row that samples, by request id."""
        ...
