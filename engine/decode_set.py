"""The running requests that only decode, treated as one. Knows no blocks, budget, policy or text.

A request decodes while exactly one of its known tokens is not computed yet. A step computes that
one and appends the next, so the request is afterwards what it was, one token longer. What a steady
step does to a thousand such requests is therefore done to all of them at once; a closer look is
kept for those to whom something happens: the step fills a block, or may end the generation.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.batch import BatchRow
from engine.config import EngineConfig
from engine.request import Progress, Request


class DecodeSet:
    """Requests with one pending token each, in the order in which they caught up.

    Tokens and block tables stay the requests' own. Only the numbers that every step compares are
    copied into columns, and `violations` says whether they still agree.
    """

    def __init__(self, config: EngineConfig, *, max_requests: int) -> None:
        self._config = config
        self._requests: list[Request] = []
        self._block_ids: list[Sequence[int]] = []
        # One table, so that a request leaves by a single shift. Its rows are num_tokens,
        # num_prompt_tokens and `watched_from`.
        self._table = np.zeros((3, max_requests), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._requests)

    def join(self, request: Request, block_ids: Sequence[int]) -> None:
        """Take in a running request that has caught up; `block_ids` is its live block table."""
        assert request.num_pending_tokens == 1
        watched = watched_from(request, self._config)
        self._table[:, len(self)] = request.num_tokens, request.num_prompt_tokens, watched
        self._requests.append(request)
        self._block_ids.append(block_ids)

    def leave(self, request: Request) -> None:
        """Let a member go, whether it finished or was preempted."""
        row = self._requests.index(request)
        del self._requests[row], self._block_ids[row]
        self._table[:, row : len(self)] = self._table[:, row + 1 : len(self) + 1]

    def batch_rows(self) -> list[BatchRow]:
        """The work of this step: the pending token of every member."""
        starts = (self._column(0) - 1).tolist()
        new = tuple.__new__  # What a NamedTuple adds to it would be half the time of planning.
        return [
            new(
                BatchRow,
                (
                    request.request_id,
                    (request.all_token_ids[-1],),
                    start,
                    block_ids,
                    True,
                    request.sampling,
                    request.prompt_token_ids,
                    request.output_token_ids,
                ),
            )
            for request, start, block_ids in zip(
                self._requests, starts, self._block_ids, strict=True
            )
        ]

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
        num_tokens, num_prompt_tokens = self._column(0), self._column(1)
        starts = (num_tokens - num_prompt_tokens).tolist()
        num_tokens += 1
        return Progress(requests, starts, new_token_ids)

    def at_block_boundary(self) -> list[Request]:
        """Members whose computed tokens fill their blocks, and whose pending one needs another."""
        block_size = self._config.block_size
        return self._where(self._column(0) % block_size == 1 % block_size)

    def that_may_end(self, progress: Progress) -> list[Request]:
        """Members whose last token, as `advance` reported it, has to be looked at by itself."""
        is_eos = map(self._config.eos_token_ids.__contains__, progress.token_ids)
        is_watched = self._column(0) >= self._column(2)
        return self._where(is_watched | np.fromiter(is_eos, dtype=np.bool_, count=len(self)))

    def violations(self) -> list[str]:
        """Members whose column no longer says what the request says; empty when all is well."""
        return [
            f"{request.request_id}: {request.num_pending_tokens} pending of {request.num_tokens}"
            f" tokens, in a decode column of {num_tokens}"
            for request, num_tokens in zip(self._requests, self._column(0).tolist(), strict=True)
            if (request.num_pending_tokens, request.num_tokens) != (1, num_tokens)
        ]

    def _column(self, index: int) -> NDArray[np.int64]:
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
