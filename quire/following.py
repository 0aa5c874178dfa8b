"""Follows one output log as its reader sees it; knows neither a connection nor how to wait.

The clients read, and hand what they read to a Following; when a read was silent they hand it the
request's record instead. It keeps the reader's place and says what became of the request.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from quire.errors import (
    Cancelled,
    DeadlineExceeded,
    OutputRewound,
    ProtocolError,
    RequestFailed,
    ResultExpired,
    UnknownRequest,
    WaitTimeout,
)
from quire.output import Completion, State, TokenChunk
from quire.output_log import OutputRead
from quire.transitions import RequestStatus


class Following:
    """The place of one reader in the log of one request.

    `seen` is the number of tokens the reader has, `known` whether the request was heard of before,
    `timeout` after how many seconds `patience` gives up; None never does.
    """

    def __init__(
        self, request_id: str, *, after: int = 0, known: bool = False, timeout: float | None = None
    ) -> None:
        self.request_id = request_id
        self.seen = after
        self.known = known
        self._give_up = None if timeout is None else time.monotonic() + timeout
        self._ends_without_entry = 0

    @property
    def position(self) -> dict[str, int]:
        """Where to read on, as `Broker.read_output` takes it."""
        return {self.request_id: self.seen}

    def take(self, read: OutputRead) -> Iterator[TokenChunk | Completion]:
        """What was read, in order; the completion is the last. ProtocolError for a gap."""
        self.known = True
        for chunk in read.chunks:
            if chunk.start != self.seen:
                raise ProtocolError(f"{self.request_id}: the log has a gap at token {self.seen}")
            yield chunk
            self.seen = chunk.end
        if read.completion is not None:
            yield read.completion

    def silent(self, status: RequestStatus | None) -> None:
        """Judges a read without news by the record of the request, None when there is none.

        UnknownRequest, ResultExpired, OutputRewound; otherwise there is reason to wait on.
        """
        if status is None:
            error = ResultExpired if self.known else UnknownRequest
            raise error(self.request_id)
        self.known = True
        if status.published < self.seen:
            raise OutputRewound(self.request_id, seen=self.seen, published=status.published)
        # The end may have come since the read, but it cannot be missing twice.
        self._ends_without_entry += status.state.is_terminal
        if self._ends_without_entry > 1:
            raise ResultExpired(self.request_id)

    def patience(self, longest_seconds: float) -> float:
        """For how long the next read may wait. WaitTimeout when the time is over."""
        if self._give_up is None:
            return longest_seconds
        left = min(longest_seconds, self._give_up - time.monotonic())
        if left <= 0:
            raise WaitTimeout(f"{self.request_id} has not ended yet")
        return left


def joined(completion: Completion, chunks: Sequence[TokenChunk]) -> Completion:
    """The completion with all text and tokens in it."""
    return replace(
        completion,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
    )


def raise_unless_completed(completion: Completion) -> None:
    """Raises what became of the request, unless it completed."""
    if completion.state is State.COMPLETED:
        return
    kinds = {State.CANCELLED: Cancelled, State.EXPIRED: DeadlineExceeded}
    kind = kinds.get(completion.state, RequestFailed)
    if completion.error is None:
        raise kind(str(completion.state), "the request did not complete", completion=completion)
    error = completion.error
    raise kind(error.code, error.message, error.field, completion=completion)
