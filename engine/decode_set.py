"""The running requests that only decode, treated as one. Knows no pool, budget, policy or text.

A request decodes while exactly one of its known tokens is not computed yet. A step computes that
one and appends the next, so the request is afterwards what it was, one token longer. What a steady
step does to a thousand such requests is therefore done to all of them at once; a closer look is
kept for those to whom something happens: the step fills a block, or may end the generation.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.batch import NO_DECODES, DecodeRows, IntArray
from engine.config import EngineConfig
from engine.request import Progress, Request

#: What is kept of each member: its length, how much of that is prompt, the length from which on its
#: tokens are looked at, its pending token, and which of the block tables is its own.
_NUM_TOKENS, _NUM_PROMPT_TOKENS, _WATCHED_FROM, _PENDING_TOKEN, _SEAT = COLUMNS = range(5)


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
        self._free_seats = list(range(max_requests))
        # All grow by a token per step, so those that reach the end of a block together always will.
        self._parties: list[dict[Request, Member]] = [{} for _ in range(config.block_size)]
        self._num_advances = 0

    def __len__(self) -> int:
        return len(self._requests)

    def join(self, request: Request, block_ids: Sequence[int]) -> None:
        """Take in a running request that has caught up; `block_ids` is its live block table."""
        assert request.num_pending_tokens == 1
        seat = self._free_seats.pop()
        self._table[:, len(self)] = (
            request.num_tokens,
            request.num_prompt_tokens,
            watched_from(request, self._config),
            request.all_token_ids[-1],
            seat,
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
        starts = self._column(_NUM_TOKENS) - 1
        num_blocks = int(starts.max()) // block_size + 1
        self._make_wide(num_blocks)
        for seat, block_ids in self._party(1).values():
            self._block_tables[seat, len(block_ids) - 1] = block_ids[-1]
        return DecodeRows(
            requests=tuple(self._requests),
            token_ids=self._column(_PENDING_TOKEN).copy(),
            starts=starts,
            block_tables=self._block_tables[self._column(_SEAT), :num_blocks],
            block_size=block_size,
        )

    def advance(self, token_ids: Mapping[str, int]) -> Progress:
        """Commit a computed step: the sampled token becomes the pending one, of every member."""
        requests = list(self._requests)
        new_token_ids = [token_ids[request.request_id] for request in requests]
        for token_lists in (
            [request.output_token_ids for request in requests],
            [request.all_token_ids for request in requests],
        ):
            # A deque that keeps nothing only runs the appends, without a line of Python for each.
            deque(map(list.append, token_lists, new_token_ids), maxlen=0)
        num_tokens = self._column(_NUM_TOKENS)
        starts = (num_tokens - self._column(_NUM_PROMPT_TOKENS)).tolist()
        num_tokens += 1
        self._num_advances += 1
        self._column(_PENDING_TOKEN)[:] = new_token_ids
        return Progress(requests, starts, new_token_ids)

    def at_block_boundary(self) -> list[Request]:
        """Members whose computed tokens fill their blocks, and whose pending one needs another."""
        return list(self._party(1))

    def that_may_end(self, progress: Progress) -> list[Request]:
        """Members whose last token, as `advance` reported it, has to be looked at by itself."""
        is_eos = map(self._config.eos_token_ids.__contains__, progress.token_ids)
        is_watched = self._column(_NUM_TOKENS) >= self._column(_WATCHED_FROM)
        return self._where(is_watched | np.fromiter(is_eos, dtype=np.bool_, count=len(self)))

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
            elif request.all_token_ids[-1] != row[_PENDING_TOKEN]:
                found.append(f"{request.request_id}: another token is pending in its decode column")
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


def watched_from(request: Request, config: EngineConfig) -> int:
    """Length from which on every token of a request is looked at by itself.

    For most that is the length at which one of the limits ends them. Text has to be fed, a stop
    token compared and a first token stamped, whatever the length.
    """
    sampling = request.sampling
    if request.text is not None or sampling.stop_token_ids or request.times.first_token is None:
        return 0
    return min(request.num_prompt_tokens + sampling.max_tokens, config.max_request_tokens)
