"""The state of one reader of an output log. Sends nothing and never waits.

A client passes what it has read to a Following, or the request's status after a read without news.
The Following keeps the reader's cursor, and detects the end, a lost log and an expired request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from quire.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    OutputRewound,
    ProtocolError,
    RequestFailed,
    ResultExpired,
    UnknownRequest,
)
from quire.queue.publish.output_log import OutputRead
from quire.queue.request.status import RequestStatus
from quire.transport.patience import Patience
from quire.wire.history import EMPTY, extended
from quire.wire.output import Completion, State, TokenChunk, is_prefix_hash

#: How often a log is read from its beginning before it counts as damaged. A request is not requeued
#: more often than this while it is read.
MAX_READINGS = 5


class Following:
    """The cursor of one reader in the log of one request.

    `after` is the number of tokens that the reader has. `known`: the request has existed. `timeout`
    is that of its `patience`, in seconds; None for no limit. `prefix_hash` is the hash of the
    reader's tokens, if it kept it: see history.py. For `outage_seconds` and `explains` see
    Patience. InvalidRequest for a negative `after` or an invalid hash.
    """

    def __init__(
        self,
        request_id: str,
        *,
        after: int = 0,
        known: bool = False,
        timeout: float | None = None,
        prefix_hash: str = "",
        outage_seconds: float = 0.0,
        explains: bool = True,
    ) -> None:
        if after < 0:
            raise InvalidRequest("after", "must not be negative")
        if prefix_hash and not is_prefix_hash(prefix_hash):
            raise InvalidRequest("prefix_hash", "must be that of a chunk")
        self.request_id = request_id
        self.seen = after
        self.known = known
        self.patience = Patience(
            timeout,
            request_id,
            outage_seconds=outage_seconds,
            has_answered=known,
            explains=explains,
        )
        #: Whether the request waited for a worker at the last status.
        self.is_queued = False
        #: Whether the request is overdue, and a reader has to end it.
        self.is_overdue = False
        #: Whether the completion was read.
        self.has_ended = False
        self._has_read = False
        self._ends_without_entry = 0
        # Whether the log certainly had as many tokens as the reader says.
        self._was_there = not after or bool(prefix_hash)
        # `_hash`: of all tokens seen, empty while unknown. `_base_hash`: of the first `_base`
        # tokens. `_token_ids`: the tokens after these.
        self._hash = prefix_hash if after else EMPTY
        self._base, self._base_hash = after, self._hash
        self._token_ids: list[int] = []

    @property
    def position(self) -> dict[str, int]:
        """The cursor to read on from, as `Broker.read_output` takes it."""
        return {self.request_id: self.seen}

    def take(self, read: OutputRead) -> Iterator[TokenChunk | Completion]:
        """The items of a read, in order; the completion is the last one.

        ProtocolError for a gap or a damaged entry. OutputRewound if the read does not continue what
        was read before.
        """
        self.known = self._has_read = True
        self._ends_without_entry = 0
        self.patience.has_news()
        for item in read:
            if isinstance(item, Completion):
                self._remember((), item.prefix_hash)
                self.has_ended = True
                yield item
                continue
            if item.start != self.seen:
                raise ProtocolError(f"{self.request_id}: the log has a gap at token {self.seen}")
            self._remember(item.token_ids, item.prefix_hash)
            self._was_there = True
            yield item
            self.seen = item.end

    def silent(self, status: RequestStatus | None) -> None:
        """Checks the status of the request after a read without news; None if it does not exist.

        UnknownRequest, ResultExpired, OutputRewound; otherwise the reader should read on. If the
        request `is_overdue`, the reader should end it, because there may be no live worker.
        """
        self._has_read = True
        if status is None:
            error = ResultExpired if self.known else UnknownRequest
            raise error(self.request_id)
        self.known = True
        self.is_queued = status.state in (State.QUEUED, State.SCHEDULED)
        if status.published < self.seen or self._is_rewritten(status):
            raise OutputRewound(
                self.request_id,
                seen=self.seen,
                published=status.published,
                kept=self._kept(status),
                is_certain=self._was_there,
            )
        # The end may have been written since the read, but then the next read must return it.
        self._ends_without_entry += status.state.is_terminal
        if self._ends_without_entry > 1:
            raise ResultExpired(self.request_id)
        self.is_overdue = not status.state.is_terminal and status.seconds_left == 0
        # For an overdue request no further status at a fixed time is needed.
        self.patience.look_in(status.seconds_left or None)

    @property
    def must_find_the_end(self) -> bool:
        """Whether the next read must not wait.

        The request has ended, so its log is complete. A waiting read shares an XREAD with others
        and may time out before the XREAD is sent, so a missing end would prove nothing.
        """
        return self._ends_without_entry > 0

    def longest_wait(self, longest_seconds: float) -> float | None:
        """For how many seconds the next read may wait, at most; None if it must not wait.

        The first read does not wait. WaitTimeout, also if the next read must not wait.
        """
        if not self._has_read:
            return None
        left = self.patience.left(longest_seconds)
        return None if self.must_find_the_end else left

    def _remember(self, token_ids: Sequence[int], prefix_hash: str) -> None:
        """Adds tokens to those seen. OutputRewound if the log has other tokens before them."""
        end = self.seen + len(token_ids)
        if self._hash:
            self._hash = extended(self._hash, token_ids)
            self._token_ids += token_ids
            if prefix_hash not in ("", self._hash):
                raise OutputRewound(self.request_id, seen=self.seen, published=end)
        else:
            # The reader began in the middle without a hash; this is its first one.
            self._hash = self._base_hash = prefix_hash
            self._base = end

    def _is_rewritten(self, status: RequestStatus) -> bool:
        """Whether a log of the same length certainly has other tokens than were seen."""
        is_known = status.published == self.seen and self._hash and status.prefix_hash
        return bool(is_known) and status.prefix_hash != self._hash

    def _kept(self, status: RequestStatus) -> int:
        """How many of the reader's tokens are certainly still in a log that became shorter."""
        left = status.published - self._base
        if left < 0 or not self._base_hash:
            return 0
        mine = extended(self._base_hash, self._token_ids[:left])
        return status.published if mine == status.prefix_hash else 0


def joined_items(items: Sequence[TokenChunk | Completion]) -> Completion:
    """See `joined`, for everything that was read, in order."""
    *chunks, completion = items
    assert isinstance(completion, Completion), "the completion is the last item"
    return joined(completion, [item for item in chunks if isinstance(item, TokenChunk)])


def joined(completion: Completion, chunks: Sequence[TokenChunk]) -> Completion:
    """The completion with all text, tokens and log-probabilities in it."""
    ends: list[int] = []
    num_chars = 0
    for chunk in chunks:
        ends += (num_chars + end for end in chunk.text_ends)
        num_chars += len(chunk.text)
    token_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
    return replace(
        completion,
        text="".join(chunk.text for chunk in chunks) + completion.tail,
        token_ids=token_ids,
        text_ends=tuple(ends) if len(ends) == len(token_ids) else (),
        logprobs=tuple(one for chunk in chunks for one in chunk.logprobs),
        prompt_tokens=chunks[0].prompt_tokens if chunks else (),
        prompt_token_ids=chunks[0].prompt_token_ids if chunks else (),
    )


def raise_unless_completed(completion: Completion) -> None:
    """Raises the error for a request that did not complete."""
    if completion.state is State.COMPLETED:
        return
    kinds = {State.CANCELLED: Cancelled, State.EXPIRED: DeadlineExceeded}
    kind = kinds.get(completion.state, RequestFailed)
    if completion.error is None:
        raise kind(str(completion.state), "the request did not complete", completion=completion)
    error = completion.error
    raise kind(error.code, error.message, error.field, completion=completion)
