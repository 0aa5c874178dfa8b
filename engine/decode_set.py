"""The running requests that only decode, treated as one. Knows no pool, budget, policy or text.

A request decodes while exactly one of its tokens is not computed yet. A step computes that one and
brings the next, so the request is afterwards what it was, one token longer. What a steady step does
to a thousand such requests is therefore done to all of them at once; a closer look is kept for
those to whom something happens: the step fills a block, or may end the generation.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.batch import NO_DECODES, UNKNOWN_TOKEN, DecodeRows, IntArray
from engine.config import EngineConfig
from engine.request import Progress, Request

#: What is kept of each member: its length, that of its prompt, the length from which on its tokens
#: are looked at, the one at which it ends for certain, and which of the block tables is its own.
_NUM_TOKENS, _NUM_PROMPT_TOKENS, _WATCHED_FROM, _LIMIT, _SEAT = COLUMNS = range(5)


class Member(NamedTuple):
    """Where a request's block table is copied to, and the live one."""

    seat: int
    block_ids: Sequence[int]


NOBODY = Member(-1, ())


class DecodeSet:
    """Requests with one pending token each, in the order in which they caught up.

    Tokens and block tables stay the requests' own. Only the numbers of every step are copied into
    columns, and `violations` says whether they still agree.
    """

    def __init__(self, config: EngineConfig, *, max_requests: int) -> None:
        self._config = config
        self._requests: list[Request] = []
        # One table, so that a request leaves by a single shift; but the long block tables stay
        # where they are, each in a seat of its own.
        self._table = np.zeros((len(COLUMNS), max_requests), dtype=np.int64)
        self._block_tables = np.zeros((max_requests, 1), dtype=np.int64)
        self._pending_tokens = np.zeros(max_requests, dtype=np.int64)
        self._free_seats = list(range(max_requests))
        self._eos_token_ids = np.array(sorted(config.eos_token_ids), dtype=np.int64)
        # All grow by a token per step, so those that reach the end of a block together always will.
        self._parties: list[dict[Request, Member]] = [{} for _ in range(config.block_size)]
        self._num_advances = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> Sequence[Request]:
        """The members, in their order, as they are now."""
        return tuple(self._requests)

    def join(self, request: Request, block_ids: Sequence[int]) -> None:
        """Take in a running request that has caught up; `block_ids` is its live block table."""
        assert request.num_pending_tokens == 1
        seat = self._free_seats.pop()
        limit = limit_of(request, self._config)
        watched_from = 0 if needs_watching(request) else limit
        lengths = request.num_tokens, request.num_prompt_tokens
        self._table[:, len(self)] = (*lengths, watched_from, limit, seat)
        self._pending_tokens[seat] = (
            UNKNOWN_TOKEN if request.expects_token else request.last_token_id
        )
        self._requests.append(request)
        self._party(request.num_tokens)[request] = Member(seat, block_ids)
        self._make_wide(len(block_ids))
        self._block_tables[seat, : len(block_ids)] = block_ids

    def leave(self, request: Request) -> None:
        """Let a member go, whether it finished or was preempted."""
        row = self._requests.index(request)
        self._free_seats.append(self._party(request.num_tokens).pop(request).seat)
        del self._requests[row]
        self._table[:, row : len(self)] = self._table[:, row + 1 : len(self) + 1]

    def rows(self) -> DecodeRows:
        """The work of this step: the pending token of every member, which has its block by now."""
        if not self._requests:
            return NO_DECODES
        block_size = self._config.block_size
        seats, starts = self._column(_SEAT).copy(), self._column(_NUM_TOKENS) - 1
        num_blocks = int(starts.max()) // block_size + 1
        self._make_wide(num_blocks)
        for seat, block_ids in self._party(1).values():
            self._block_tables[seat, len(block_ids) - 1] = block_ids[-1]
        return DecodeRows(
            requests=tuple(self._requests),
            token_ids=self._pending_tokens[seats],
            starts=starts,
            output_indices=starts + 1 - self._column(_NUM_PROMPT_TOKENS),
            block_tables=self._block_tables[seats, :num_blocks],
            seats=seats,
            watched_from=self._column(_WATCHED_FROM).copy(),
            block_size=block_size,
        )

    def advance(self) -> list[Request]:
        """Count a launched step: every member expects a token. Returns those it ends for certain.

        They are members until they `leave`, which they have to before the next step.
        """
        for request in self._requests:
            request.expects_token = True
        self._pending_tokens[self._column(_SEAT)] = UNKNOWN_TOKEN
        num_tokens = self._column(_NUM_TOKENS)
        num_tokens += 1
        self._num_advances += 1
        return self._where(num_tokens >= self._column(_LIMIT))

    def append_tokens(
        self, rows: DecodeRows, token_ids: Sequence[int]
    ) -> tuple[Progress, list[Request]]:
        """Record what a step has brought to those that decoded in it; some have left since.

        Returns also those whose new token has to be looked at by itself, for it may be the last.
        """
        assert len(token_ids) == len(rows)
        column = np.fromiter(token_ids, dtype=np.int64, count=len(rows))
        assert column.min(initial=0) >= 0, "one without a token has not ended"
        for request, token_id in zip(rows.requests, token_ids, strict=True):
            request.expects_token = False
            request.output_token_ids.append(token_id)
        # A seat that has gone to another is written again by that one's own token, if it lacks it.
        expected = self._pending_tokens[rows.seats] == UNKNOWN_TOKEN
        self._pending_tokens[rows.seats[expected]] = column[expected]
        is_eos = (column[:, None] == self._eos_token_ids).any(axis=1)
        may_end = (rows.starts + 2 >= rows.watched_from) | is_eos
        progress = Progress(list(rows.requests), rows.output_indices.tolist(), list(token_ids))
        return progress, [rows.requests[row] for row in may_end.nonzero()[0].tolist()]

    def tell(self, request: Request) -> None:
        """The token that a request expected when it joined is known, if it is still a member."""
        seat = self._party(request.num_tokens).get(request, NOBODY).seat
        if seat != NOBODY.seat:
            self._pending_tokens[seat] = request.last_token_id

    def at_block_boundary(self) -> list[Request]:
        """Members whose computed tokens fill their blocks, and whose pending one needs another."""
        return list(self._party(1))

    def violations(self) -> list[str]:
        """What of the columns and tables no longer says what the requests say; empty if all do."""
        found = []
        columns = self._table[:, : len(self)].T.tolist()
        for request, row in zip(self._requests, columns, strict=True):
            if (request.num_pending_tokens, request.num_tokens) != (1, row[_NUM_TOKENS]):
                found.append(
                    f"{request.request_id}: {request.num_pending_tokens} pending of"
                    f" {request.num_tokens} tokens, in a decode column of {row[_NUM_TOKENS]}"
                )
            elif not request.expects_token and (
                request.last_token_id != self._pending_tokens[row[_SEAT]]
            ):
                found.append(f"{request.request_id}: another token is pending in its decode seat")
            if request.num_prompt_tokens != row[_NUM_PROMPT_TOKENS]:
                found.append(f"{request.request_id}: another prompt's length in its decode column")
            seat, block_ids = self._party(row[_NUM_TOKENS]).get(request, NOBODY)
            table = self._block_tables[seat, : len(block_ids)]
            if seat != row[_SEAT] or table.tolist() != list(block_ids):
                found.append(f"{request.request_id}: other blocks in its decode table")
        seats = [*self._free_seats, *(row[_SEAT] for row in columns)]
        if sorted(seats) != list(range(self._table.shape[1])):
            found.append("a seat for a block table is lost, or taken twice")
        return found

    def _party(self, num_tokens: int) -> dict[Request, Member]:
        """Members whose length is `num_tokens`, or longer or shorter by whole blocks."""
        return self._parties[(num_tokens - self._num_advances) % len(self._parties)]

    def _make_wide(self, num_blocks: int) -> None:
        """Room for block tables of `num_blocks`; doubled, so that growth is rarely paid for."""
        missing = num_blocks - self._block_tables.shape[1]
        if missing > 0:
            more = max(missing, self._block_tables.shape[1])
            self._block_tables = np.pad(self._block_tables, ((0, 0), (0, more)))

    def _column(self, index: int) -> IntArray:
        return self._table[index, : len(self)]

    def _where(self, mask: NDArray[np.bool_]) -> list[Request]:
        return [self._requests[row] for row in mask.nonzero()[0]]


def that_filled_a_block(rows: DecodeRows) -> list[tuple[Request, int]]:
    """The requests whose computed tokens, those of this step included, fill their blocks; how many.

    No two of a request's steps have the same answer, so each full block is seen once.
    """
    num_computed = rows.starts + 1
    filled = (num_computed % rows.block_size == 0).nonzero()[0]
    requests = [rows.requests[row] for row in filled.tolist()]
    return list(zip(requests, num_computed[filled].tolist(), strict=True))


def needs_watching(request: Request) -> bool:
    """Whether every token of a request is looked at by itself, and not only an EOS and the last.

    Text has to be fed, a constraint asked, a stop token compared and a first token stamped.
    """
    has_first_token = request.times.first_token is not None or request.expects_token
    is_fed = request.text is not None or request.constraint is not None
    return is_fed or bool(request.sampling.stop_token_ids) or not has_first_token


def limit_of(request: Request, config: EngineConfig) -> int:
    """The length at which a request ends, whatever its tokens are."""
    longest = request.num_prompt_tokens + request.sampling.max_tokens
    return min(longest, config.max_request_tokens)
