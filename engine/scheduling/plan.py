"""A step while it is planned: its rows and swaps, and what is left of its budget. No decisions."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.batch import Batch, BatchRow, BlockCopy, DecodeRows
from engine.request import Request


@dataclass(slots=True)
class Plan:
    """The step being planned: `budget` is what is left of it, `rows` are those beside the decodes.

    Rows are by request id, in the order in which they were planned.
    """

    budget: int
    now: float
    rows: dict[str, tuple[BatchRow, Request]] = field(default_factory=dict)
    preempted_ids: set[str] = field(default_factory=set)
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)

    def take(
        self,
        request: Request,
        *,
        end: int,
        block_ids: Sequence[int],
        draft: Sequence[int] = (),
    ) -> None:
        """Plan a request's pending tokens before position `end`, followed by a draft."""
        start = request.num_computed_tokens
        row = BatchRow(
            request_id=request.request_id,
            token_ids=[*request.token_ids_between(start, end), *draft],
            start=start,
            block_ids=block_ids,
            samples=end == request.num_tokens,
            sampling=request.sampling,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
            constraint=request.constraint,
            num_drafted=len(draft),
            adapter=request.adapter,
        )
        self.rows[request.request_id] = row, request
        self.budget -= len(row.token_ids)

    def as_batch(self, step: int, decodes: DecodeRows) -> Batch:
        """The finished plan."""
        return Batch(
            step=step,
            decodes=decodes,
            catch_up_rows=tuple(row for row, _ in self.rows.values()),
            catch_up_requests=tuple(request for _, request in self.rows.values()),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
        )
