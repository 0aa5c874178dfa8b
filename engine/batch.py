"""The Batch: the Scheduler's immutable plan for one step, and all a ModelRunner ever sees.

Knows no device. A row is a run of consecutive tokens of one request; a decode is a run of length
one and a prefill chunk a longer one: nothing else tells them apart. Those that had caught up come
as columns, because there may be a thousand of them in every step; the few others as records. A
decode whose next tokens are guessed is a longer row with a draft at its end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.constraint import Constraint
from engine.logprobs import Logprobs
from engine.request import Request
from engine.sampling_params import SamplingParams

IntArray = NDArray[np.int64]

#: In place of a token that the step before this one is still to bring.
UNKNOWN_TOKEN = -1


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

    `samples` says that the row's last token is the request's last one, so its logits yield output
    number `output_index`; otherwise the row only fills the cache.

    `expects_token` says that the last token is `UNKNOWN_TOKEN`: the one that the step launched
    before this one yields for the same request. Where there is a `constraint` it never is.

    `adapter` names what is added to the model's linear layers for its tokens; None for nothing.

    The last `num_drafted` of the tokens are a draft: nobody knows yet whether they are what would
    be chosen. Then the row yields a token for each row of `unrolled()`.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    samples: bool
    sampling: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    expects_token: bool = False
    constraint: Constraint | None = None
    num_drafted: int = 0
    adapter: str | None = None

    @property
    def output_index(self) -> int:
        """Number of the output token that the row would yield; with a draft, the first one's."""
        return len(self.output_token_ids) + self.expects_token

    @property
    def end(self) -> int:
        """One past the last position; also the row's context length after the step."""
        return self.start + len(self.token_ids)

    @property
    def draft(self) -> Sequence[int]:
        """The guessed tokens at the row's end."""
        return self.token_ids[len(self.token_ids) - self.num_drafted :]

    def unrolled(self) -> "Sequence[BatchRow]":
        """The rows it would have been without a draft, had the drafted tokens come one by one."""
        if not self.num_drafted:
            return (self,)
        known, draft = self.token_ids[: -self.num_drafted], self.draft
        return [self._replace(token_ids=known, num_drafted=0)] + [
            self._replace(
                token_ids=self.token_ids[: len(known) + count],
                output_token_ids=[*self.output_token_ids, *draft[:count]],
                constraint=self.constraint
                and self.constraint.assuming(self.output_token_ids, draft[:count]),
                num_drafted=0,
            )
            for count in range(1, len(draft) + 1)
        ]

    def run_of(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Of the tokens chosen for the rows of `unrolled()`, those that count.

        Each row takes the drafted tokens before it as given, so the first token that is not the
        drafted one is the last.
        """
        for count, (token_id, drafted) in enumerate(zip(token_ids, self.draft, strict=False), 1):
            if token_id != drafted:
                return token_ids[:count]
        return token_ids


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """The rows of requests that had caught up: one token each, and each is due the next one.

    Args:
        requests: the live records, to be read and never to be changed.
        token_ids: [rows], the last token of each, `UNKNOWN_TOKEN` where it is expected.
        starts: [rows], its position.
        output_indices: [rows], number of the output token that each yields.
        block_tables: [rows, most blocks of any row]; of each row the blocks of positions
            `0 .. start`, what lies behind them may be anything.
        seats, watched_from: [rows], what the scheduler has to remember; nothing to a runner.
        block_size: slots per block.
    """

    requests: Sequence[Request]
    token_ids: IntArray
    starts: IntArray
    output_indices: IntArray
    block_tables: IntArray
    seats: IntArray
    watched_from: IntArray
    block_size: int

    def __len__(self) -> int:
        return len(self.requests)

    def without_finished(self, token_ids: Sequence[int]) -> "tuple[DecodeRows, Sequence[int]]":
        """The rows of requests that have not ended since they were planned, and what they got."""
        kept = [row for row, one in enumerate(self.requests) if one.finish_reason is None]
        rows = DecodeRows(
            requests=tuple(self.requests[row] for row in kept),
            token_ids=self.token_ids[kept],
            starts=self.starts[kept],
            output_indices=self.output_indices[kept],
            block_tables=self.block_tables[kept],
            seats=self.seats[kept],
            watched_from=self.watched_from[kept],
            block_size=self.block_size,
        )
        return rows, [token_ids[row] for row in kept]

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
                expects_token=token_id == UNKNOWN_TOKEN,
                constraint=request.constraint,
                adapter=request.adapter,
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
NO_DECODES = DecodeRows(
    requests=(),
    token_ids=_NOTHING,
    starts=_NOTHING,
    output_indices=_NOTHING,
    block_tables=np.zeros((0, 0), dtype=np.int64),
    seats=_NOTHING,
    watched_from=_NOTHING,
    block_size=1,
)


@dataclass(frozen=True, slots=True)
class Batch:
    """The plan of one step.

    The runner does swap_out, then swap_in, then computes the rows, in this order: a block may be
    swapped out and handed to another request within the same step.

    swap_out: device block -> host block; swap_in: host block -> device block. The rows are the
    decodes and then the others, which may have one token as well; `catch_up_requests` are the live
    records behind the others, in their order, and nothing to a runner.
    """

    step: int
    decodes: DecodeRows = NO_DECODES
    catch_up_rows: tuple[BatchRow, ...] = ()
    catch_up_requests: tuple[Request, ...] = ()
    swap_out: tuple[BlockCopy, ...] = ()
    swap_in: tuple[BlockCopy, ...] = ()

    @property
    def rows(self) -> tuple[BatchRow, ...]:
        """All rows as records, made anew with every look."""
        return (*self.decodes.as_rows(), *self.catch_up_rows)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Whose rows they are."""
        return (*self.decodes.requests, *self.catch_up_requests)

    @property
    def due(self) -> list[Request | BatchRow]:
        """Those whose next token the step yields, in the order of the rows, drafts unrolled."""
        sampling = (row.unrolled() for row in self.catch_up_rows if row.samples)
        return [*self.decodes.requests, *chain.from_iterable(sampling)]

    @property
    def drafted_rows(self) -> list[BatchRow]:
        """The rows with a draft."""
        return [row for row in self.catch_up_rows if row.num_drafted]

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.catch_up_rows)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(len(row.token_ids) for row in self.catch_up_rows)

    @property
    def is_empty(self) -> bool:
        return not (self.num_rows or self.swap_out or self.swap_in)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has computed.

    Args:
        decoded: the next token of each of the batch's decodes, in their order; of one in `failures`
            any number.
        token_ids: that of every other row that samples and has no draft, by request id.
        failures: why others have none, by request id: the model's own, logits that are no numbers.
        logprobs: how likely the tokens were, one for each, of the rows that ask, by request id.
        runs: the next tokens, one at least, of every row with a draft, by request id: as much of
            the draft as would have been chosen, and the token behind it.
    """

    decoded: Sequence[int] = ()
    token_ids: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    logprobs: Mapping[str, Sequence[Logprobs]] = field(default_factory=dict)
    runs: Mapping[str, Sequence[int]] = field(default_factory=dict)


class LaunchedStep(Protocol):
    """A step that a device has been told to compute."""

    @property
    def is_in_flight(self) -> bool:
        """The device may still be at it, so it is worth while to launch the next step behind it."""
        ...

    def result(self) -> StepResult:
        """Wait for the device; asked again, the same.

        Raises:
            DeviceFailed: as in `ModelRunner`.
        """
        ...


class ComputedStep(NamedTuple):
    """A step that was computed while it was launched."""

    outcome: StepResult
    is_in_flight: bool = False

    def result(self) -> StepResult:
        return self.outcome


class ModelRunner(Protocol):
    """Executes Batches on a device, in the order in which they are launched.

    Stateless but for the KV pool: running the same rows twice gives the same tokens.

    Raises:
        DeviceFailed: nothing the device says can be trusted any more, or a swap failed half-way.
        Exception: the rows failed, after the swaps were done; the engine finds the culprit by
            running the rows one by one, without the swaps.
    """

    def launch(self, batch: Batch, *, after: LaunchedStep | None = None) -> LaunchedStep:
        """Tell the device to compute a batch.

        `after` is the step in flight that was launched before, and that brings the tokens of this
        batch which are unknown.
        """
        ...
