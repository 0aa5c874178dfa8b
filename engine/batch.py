"""The Batch: the Scheduler's immutable plan for one step, and all a ModelRunner ever sees.

Knows no device. A row is a run of consecutive tokens of one request; a decode is a run of length
one and a prefill chunk a longer one: nothing else tells them apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.sampling_params import SamplingParams


class BlockCopy(NamedTuple):
    """Copy one block's K and V, all layers, bit for bit."""

    source: int
    destination: int


class BatchRow(NamedTuple):
    """The work of one request in this step; a tuple, because a step makes one per running request.

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


@dataclass(frozen=True, slots=True)
class Batch:
    """The plan of one step.

    The runner does swap_out, then swap_in, then computes the rows, in this order: a block may be
    swapped out and handed to another request within the same step.

    swap_out: device block -> host block; swap_in: host block -> device block. The first
    `num_decodes` rows have one token each; others may have one as well.
    """

    step: int
    rows: tuple[BatchRow, ...]
    swap_out: tuple[BlockCopy, ...] = ()
    swap_in: tuple[BlockCopy, ...] = ()
    num_decodes: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(len(row.token_ids) for row in self.catch_up_rows)

    @property
    def catch_up_rows(self) -> tuple[BatchRow, ...]:
        """The rows of requests that had not caught up when the step was planned."""
        return self.rows[self.num_decodes :]

    @property
    def is_empty(self) -> bool:
        return not (self.rows or self.swap_out or self.swap_in)


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
