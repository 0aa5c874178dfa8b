"""The running requests that only decode, kept as columns. Knows no pool, budget, policy or text.

A request decodes while exactly one of its tokens is not computed yet. A step computes that one and
brings the next, so afterwards the request is as before, but one token longer. A steady step can
therefore update a thousand such requests with a few array operations; only those that fill a block,
or may end, are looked at one by one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.batch import NO_DECODES, UNKNOWN_TOKEN, DecodeRows, IntArray
from engine.config import EngineConfig
from engine.request import Progress, Request

#: Rows of the table, one value per member each: the request's length; that of its prompt; the
#: length from which on each new token is looked at by itself; the length at which it must end; and
#: its row in `_block_tables` and `_pending_tokens`, which stays the same while others leave.
_NUM_TOKENS, _NUM_PROMPT_TOKENS, _WATCHED_FROM, _LIMIT, _SEAT = COLUMNS = range(5)


class Member(NamedTuple):
    """A request's row in the copied block tables, and its live block table."""

    seat: int
    block_ids: Sequence[int]


NOBODY = Member(-1, ())


class DecodeSet:
    """Requests with one pending token each, in the order in which they caught up.

    The requests stay the owners of tokens and block tables. What every step needs of them is copied
    into columns, and `violations` compares the copies with the originals.
    """

    def __init__(self, config: EngineConfig, *, max_requests: int) -> None:
        self._config = config
        self._requests: list[Request] = []
        # One table, so that a leaving request costs a single shift. The block tables are too long
        # to be shifted: each keeps its row, the member's seat.
        self._table = np.zeros((len(COLUMNS), max_requests), dtype=np.int64)
        self._block_tables = np.zeros((max_requests, 1), dtype=np.int64)
        self._pending_tokens = np.zeros(max_requests, dtype=np.int64)
        self._free_seats = list(range(max_requests))
        self._eos_token_ids = np.array(sorted(config.eos_token_ids), dtype=np.int64)
        # Members whose lengths are equal modulo the block size: as all of them grow by a token per
        # step, they fill their blocks in the same steps, and a member never changes its cohort.
        self._cohorts: list[dict[Request, Member]] = [{} for _ in range(config.block_size)]
        self._num_advances = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> Sequence[Request]:
        """The members, in order; a copy."""
        return tuple(self._requests)

    def join(self, request: Request, block_ids: Sequence[int]) -> None:
        """Add a running request that has caught up; `block_ids` is its live block table."""
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
        self._cohort(request.num_tokens)[request] = Member(seat, block_ids)
        self._make_wide(len(block_ids))
        self._block_tables[seat, : len(block_ids)] = block_ids

    def leave(self, request: Request) -> None:
        """Remove a member that has finished, was preempted or gets a draft."""
        row = self._requests.index(request)
        self._free_seats.append(self._cohort(request.num_tokens).pop(request).seat)
        del self._requests[row]
        self._table[:, row : len(self)] = self._table[:, row + 1 : len(self) + 1]

    def rows(self) -> DecodeRows:
        """The rows of this step: every member's pending token, for which it has a block by now."""
        if not self._requests:
            return NO_DECODES
        block_size = self._config.block_size
        seats, starts = self._column(_SEAT).copy(), self._column(_NUM_TOKENS) - 1
        num_blocks = int(starts.max()) // block_size + 1
        self._make_wide(num_blocks)
        for seat, block_ids in self._cohort(1).values():
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
        """Count a launched step: every member expects a token. Returns those at their limit.

        The caller has to make these `leave` before the next step.
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
        """Append to each request that decoded in a step its new token; some have left since.

        Returns the progress, and the requests whose new token may be their last.
        """
        assert len(token_ids) == len(rows)
        column = np.fromiter(token_ids, dtype=np.int64, count=len(rows))
        assert column.min(initial=0) >= 0, "a row without a token, whose request has not ended"
        for request, token_id in zip(rows.requests, token_ids, strict=True):
            request.expects_token = False
            request.output_token_ids.append(token_id)
        # A seat may belong to another request by now. If that one expects a token as well, what is
        # written here is overwritten by its own.
        expected = self._pending_tokens[rows.seats] == UNKNOWN_TOKEN
        self._pending_tokens[rows.seats[expected]] = column[expected]
        is_eos = (column[:, None] == self._eos_token_ids).any(axis=1)
        may_end = (rows.starts + 2 >= rows.watched_from) | is_eos
        progress = Progress(list(rows.requests), rows.output_indices.tolist(), list(token_ids))
        return progress, [rows.requests[row] for row in may_end.nonzero()[0].tolist()]

    def note_last_token(self, request: Request) -> None:
        """Take over the token that a member still expected when it joined; ignores non-members."""
        seat = self._cohort(request.num_tokens).get(request, NOBODY).seat
        if seat != NOBODY.seat:
            self._pending_tokens[seat] = request.last_token_id

    def at_block_boundary(self) -> list[Request]:
        """Members whose computed tokens fill all their blocks; the pending one needs another."""
        return list(self._cohort(1))

    def violations(self) -> list[str]:
        """Where columns and tables differ from the requests; empty when all is well."""
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
            seat, block_ids = self._cohort(row[_NUM_TOKENS]).get(request, NOBODY)
            table = self._block_tables[seat, : len(block_ids)]
            if seat != row[_SEAT] or table.tolist() != list(block_ids):
                found.append(f"{request.request_id}: other blocks in its decode table")
        seats = [*self._free_seats, *(row[_SEAT] for row in columns)]
        if sorted(seats) != list(range(self._table.shape[1])):
            found.append("a seat for a block table is lost, or taken twice")
        return found

    def _cohort(self, num_tokens: int) -> dict[Request, Member]:
        """Members whose length differs from `num_tokens` by whole blocks, or not at all."""
        return self._cohorts[(num_tokens - self._num_advances) % len(self._cohorts)]

    def _make_wide(self, num_blocks: int) -> None:
        """Make room for block tables of `num_blocks`; doubles the width, to copy rarely."""
        missing = num_blocks - self._block_tables.shape[1]
        if missing > 0:
            more = max(missing, self._block_tables.shape[1])
            self._block_tables = np.pad(self._block_tables, ((0, 0), (0, more)))

    def _column(self, index: int) -> IntArray:
        return self._table[index, : len(self)]

    def _where(self, mask: NDArray[np.bool_]) -> list[Request]:
        return [self._requests[row] for row in mask.nonzero()[0]]


def that_filled_a_block(rows: DecodeRows) -> list[tuple[Request, int]]:
    """Requests for which a step filled a block, each with its number of computed tokens.

    As each step computes one more, each full block is reported once.
    """
    num_computed = rows.starts + 1
    filled = (num_computed % rows.block_size == 0).nonzero()[0]
    requests = [rows.requests[row] for row in filled.tolist()]
    return list(zip(requests, num_computed[filled].tolist(), strict=True))


def needs_watching(request: Request) -> bool:
    """Whether every token of a request is looked at by itself, and not only an EOS and the last.

    Needed to feed its text, ask its constraint, compare stop tokens, and time its first token.
    """
    has_first_token = request.times.first_token is not None or request.expects_token
    is_fed = request.text is not None or request.constraint is not None
    return is_fed or bool(request.sampling.stop_token_ids) or not has_first_token


def limit_of(request: Request, config: EngineConfig) -> int:
    """The length at which a request ends, whatever its tokens are."""
    longest = request.num_prompt_tokens + request.sampling.max_tokens
    return min(longest, config.max_request_tokens)
