"""The Batch: the Scheduler's immutable plan of one step, and the only input of a ModelRunner.

Knows no device. A row is a range of consecutive tokens of one request: one token for a decode,
several for a prefill chunk; there is no other difference between the two. Decodes are stored as
columns, because a step may have a thousand of them; the few other rows are records. A decode with
drafted tokens is a longer row, with the draft at its end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.constraint import Constraint
from engine.logprobs import Logprobs
from engine.picture import Picture
from engine.request import NO_SLOT, Pooling, Request
from engine.sampling_params import SamplingParams

IntArray = NDArray[np.int64]
#: A vector of a prompt: [numbers].
Vector = NDArray[np.float32]

#: Stands for a token that the step in flight samples.
UNKNOWN_TOKEN = -1


class BlockCopy(NamedTuple):
    """Copy the keys and values of one block, in all layers, between two block ids."""

    source: int
    destination: int


class StateCopy(NamedTuple):
    """Copy the recurrent state after `num_tokens` tokens, of all layers, between two slots."""

    source: int
    destination: int
    num_tokens: int


class BatchRow(NamedTuple):
    """The work of one request in this step.

    `token_ids` have positions `start .. start + len(token_ids) - 1`. Keys and values of the token
    at position p go to slot `block_ids[p // block_size] * block_size + p % block_size`, and the
    token attends to positions 0..p.

    `block_ids`, `prompt_token_ids` and `output_token_ids` are read-only views of live lists, valid
    only in this step: copying a long table or history would cost more than planning the step.

    `samples`: the row's last token is the request's last one, so the row samples the output token
    with index `output_index`. Other rows only fill the cache.

    `expects_token`: the last token is `UNKNOWN_TOKEN`, which the step in flight samples. Always
    False for a row with a `constraint`.

    `adapter` is the name of the LoRA adapter of its tokens; None for none.

    `state_slot` has the recurrent state of the request, for a model that has one. The row reads the
    state after `start` tokens, which is zero for none, and writes that after its last token.

    `snapshot_slot` gets a copy of that state behind the row; `NO_SLOT` for none.

    With `pooling`, a row that `samples` yields the vector of its prompt, and no token.

    `pictures` are those of its prompt; see `engine.picture`.

    The row also yields the log-probabilities of the prompt tokens with the indices `scored`.

    The last `num_drafted` tokens are a draft, which this step checks. The row then samples one
    token for each row of `unrolled()`.
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
    pooling: Pooling | None = None
    pictures: Sequence[Picture] = ()
    state_slot: int = NO_SLOT
    snapshot_slot: int = NO_SLOT

    @property
    def output_index(self) -> int:
        """Index of the output token that the row samples; with a draft, of the first one."""
        return len(self.output_token_ids) + self.expects_token

    @property
    def end(self) -> int:
        """The position after the last token, which is also the context length after the step."""
        return self.start + len(self.token_ids)

    @property
    def scored(self) -> range:
        """Indices of prompt tokens; empty once there is output, as they were reported with it."""
        if self.output_token_ids:
            return range(0)
        num_prompt_tokens = len(self.prompt_token_ids)
        return self.sampling.scored(self.start, self.end, num_prompt_tokens=num_prompt_tokens)

    @property
    def draft(self) -> Sequence[int]:
        """The drafted tokens at the row's end."""
        return self.token_ids[len(self.token_ids) - self.num_drafted :]

    def unrolled(self) -> "Sequence[BatchRow]":
        """The rows of single steps, as if the drafted tokens had been sampled one by one."""
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
        """The accepted tokens, from those sampled for the rows of `unrolled()`.

        Each was sampled as if all drafted tokens before it were right. So the first token that
        differs from the draft is valid, and it is the last valid one.
        """
        for count, (token_id, drafted) in enumerate(zip(token_ids, self.draft, strict=False), 1):
            if token_id != drafted:
                return token_ids[:count]
        return token_ids


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """The decodes of a step as columns: each row has one token and samples the next one.

    Args:
        requests: the live records; read-only.
        token_ids: [rows], the last token of each request; `UNKNOWN_TOKEN` if it is in flight.
        starts: [rows], the position of that token.
        output_indices: [rows], the index of the output token that the row samples.
        block_tables: [rows, most blocks of any row]; each row has the blocks of positions
            `0 .. start`, and undefined entries after them.
        seats, watched_from: [rows], for the DecodeSet; without meaning for a runner.
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
        """The rows and tokens of requests that have not finished since the step was planned."""
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
        """The rows as records."""
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
                pictures=request.pictures,
                state_slot=request.state_slot,
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

    The runner executes `swap_out`, then `swap_in`, then the rows. The order matters: a block may be
    swapped out and given to another request in the same step, and a snapshot may be restored and
    overwritten behind a row.

    swap_out: device block -> host block; swap_in: host block -> device block. The rows are the
    decodes, then the catch-up rows, which may also have a single token. `catch_up_requests` are the
    live records of the catch-up rows, in the same order; without meaning for a runner.

    `state_out` and `state_in` are the same copies of recurrent states, between slots. The copies
    `state_restored`, from snapshots to slots, come after them.
    """

    step: int
    decodes: DecodeRows = NO_DECODES
    catch_up_rows: tuple[BatchRow, ...] = ()
    catch_up_requests: tuple[Request, ...] = ()
    swap_out: tuple[BlockCopy, ...] = ()
    swap_in: tuple[BlockCopy, ...] = ()
    state_out: tuple[StateCopy, ...] = ()
    state_in: tuple[StateCopy, ...] = ()
    state_restored: tuple[StateCopy, ...] = ()

    @property
    def rows(self) -> tuple[BatchRow, ...]:
        """All rows as records; built on every access."""
        return (*self.decodes.as_rows(), *self.catch_up_rows)

    @property
    def requests(self) -> tuple[Request, ...]:
        """The live records of all rows, in the order of the rows."""
        return (*self.decodes.requests, *self.catch_up_requests)

    @property
    def due(self) -> list[Request | BatchRow]:
        """One entry per token that the step samples, in the order of the rows, drafts unrolled."""
        sampling = (row.unrolled() for row in self.catch_up_rows if row.samples)
        return [*self.decodes.requests, *chain.from_iterable(sampling)]

    @property
    def drafted_rows(self) -> list[BatchRow]:
        """The rows with a draft."""
        return [row for row in self.catch_up_rows if row.num_drafted]

    @property
    def snapshots(self) -> list[StateCopy]:
        """The copies from slots to snapshots, made after the rows."""
        return [
            StateCopy(row.state_slot, row.snapshot_slot, row.end)
            for row in self.catch_up_rows
            if row.snapshot_slot != NO_SLOT
        ]

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.catch_up_rows)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(len(row.token_ids) for row in self.catch_up_rows)

    @property
    def is_empty(self) -> bool:
        copies = self.swap_out or self.swap_in or self.state_out or self.state_in
        return not (self.num_rows or copies or self.state_restored)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step; mappings are by request id.

    Args:
        decoded: the next token of each of the batch's decodes, in their order; an arbitrary number
            for a row in `failures`.
        token_ids: the next token of every other row that samples and has no draft.
        failures: why a row has no token, for instance because no logit is finite.
        logprobs: one entry per token, for rows that request log-probabilities.
        runs: the next tokens, at least one, of every row with a draft: the accepted part of the
            draft, and the token after it.
        vectors: the vector of every row with `pooling` that samples, but for those whose vector is
            their `prompt_logprobs`.
        prompt_logprobs: of each row, those of its `scored` tokens.
    """

    decoded: Sequence[int] = ()
    token_ids: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    logprobs: Mapping[str, Sequence[Logprobs]] = field(default_factory=dict)
    runs: Mapping[str, Sequence[int]] = field(default_factory=dict)
    vectors: Mapping[str, Vector] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, Sequence[Logprobs]] = field(default_factory=dict)


class LaunchedStep(Protocol):
    """A handle to a step that was launched on a device."""

    @property
    def is_in_flight(self) -> bool:
        """Whether the device may still compute it, so that launching the next step is useful."""
        ...

    def result(self) -> StepResult:
        """Wait for the device and return the result; idempotent.

        Raises:
            DeviceFailed: as in `Runner`.
        """
        ...


class ComputedStep(NamedTuple):
    """A step that was complete when `launch` returned, as on a CPU."""

    outcome: StepResult
    is_in_flight: bool = False

    def result(self) -> StepResult:
        return self.outcome


class Runner(Protocol):
    """Executes Batches on a device, in the order in which they are launched.

    Its only state are the KV pool and the slots of recurrent states: running the same rows twice
    gives the same tokens.

    Raises:
        DeviceFailed: results of the device can no longer be trusted, or a swap failed part-way.
        Exception: the rows failed after the swaps were done. The engine finds the failing row by
            running the rows one by one, without the swaps.
    """

    def launch(self, batch: Batch, *, after: LaunchedStep | None = None) -> LaunchedStep:
        """Launch a batch on the device.

        `after` is the step in flight, launched just before; it samples the tokens that are
        `UNKNOWN_TOKEN` in this batch.
        """
        ...
