"""A step while it is planned: its rows and swaps, and what is left of its budget. No decisions."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.batch import Batch, BatchRow, BlockCopy, DecodeRows
from engine.cache.state_slots import StateMoves
from engine.request import NO_SLOT, Request
from engine.scheduling.picture_budget import PictureBudget


@dataclass(slots=True)
class Plan:
    """The step being planned.

    `budget` is the number of tokens that it may still compute, `prefill_budget` the part of it that
    may be prefill, and `scored_budget` the number of prompt tokens that it may still score.
    `pictures` says which pictures it may still compute with. `rows` are the rows other than
    decodes, by request id, in the order in which they were planned.
    `has_decodes`: the budget has paid for one token of each decode.
    """

    budget: int
    prefill_budget: int
    scored_budget: int
    pictures: PictureBudget
    now: float
    has_decodes: bool = False
    rows: dict[str, tuple[BatchRow, Request]] = field(default_factory=dict)
    preempted_ids: set[str] = field(default_factory=set)
    #: Running requests that catch up and have no row yet. A token is kept for each of them, so that
    #: it gets on in this step, however much better ones ask for; unless it comes to a picture.
    behind: set[str] = field(default_factory=set)
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    state_moves: StateMoves = field(default_factory=StateMoves)

    def take(
        self,
        request: Request,
        *,
        end: int,
        block_ids: Sequence[int],
        draft: Sequence[int] = (),
        snapshot_slot: int = NO_SLOT,
    ) -> None:
        """Plan a request's pending tokens before position `end`, followed by a draft.

        It replaces a shorter row of the request in this plan.
        """
        if request.request_id in self.rows:
            shorter, _ = self.rows[request.request_id]
            self.budget += len(shorter.token_ids)
            self.prefill_budget += len(shorter.token_ids)
            self.scored_budget += len(shorter.scored)
        self.behind.discard(request.request_id)
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
            pooling=request.pooling,
            pictures=request.pictures,
            state_slot=request.state_slot,
            snapshot_slot=snapshot_slot,
        )
        self.rows[request.request_id] = row, request
        self.pictures.take(row.pictures, start, row.end)
        self.budget -= len(row.token_ids)
        self.scored_budget -= len(row.scored)
        if not draft:
            self.prefill_budget -= len(row.token_ids)

    def wait(self, request: Request) -> None:
        """Keep a token for a request whose picture or scores have no room in this step.

        So no more of them are admitted than there are tokens; otherwise nobody would get on.
        """
        if request.request_id not in self.rows:
            self.behind.add(request.request_id)

    @property
    def is_full(self) -> bool:
        """Whether the step can take no more prefill."""
        return min(self.budget, self.prefill_budget) <= 0

    @property
    def room(self) -> int:
        """Tokens of prefill that the step can still take, without those kept for others."""
        return min(self.budget, self.prefill_budget) - len(self.behind)

    def room_for(self, request: Request) -> int:
        """Tokens that the row of this request may have."""
        room = self.room + (request.request_id in self.behind) + self.num_planned(request)
        start, row = request.num_computed_tokens, self.rows.get(request.request_id)
        room = self.pictures.reach(request.pictures, start, start + room) - start
        may_score = self.scored_budget + (len(row[0].scored) if row else 0)
        if request.num_scored(start, start + room) <= may_score:
            return room
        return max(0, request.max_cached_tokens - start) + may_score

    def num_planned(self, request: Request) -> int:
        """The tokens of its row."""
        row = self.rows.get(request.request_id)
        return len(row[0].token_ids) if row else 0

    def as_batch(self, step: int, decodes: DecodeRows) -> Batch:
        """The finished plan. Neither the budget nor the cap on prefill may be overdrawn."""
        assert min(self.budget, self.prefill_budget, self.scored_budget) >= 0
        return Batch(
            step=step,
            decodes=decodes,
            catch_up_rows=tuple(row for row, _ in self.rows.values()),
            catch_up_requests=tuple(request for _, request in self.rows.values()),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            state_out=tuple(self.state_moves.out),
            state_in=tuple(self.state_moves.back),
            state_restored=tuple(self.state_moves.restored),
        )
