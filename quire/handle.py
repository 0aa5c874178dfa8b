"""The handle of a request: follow its output, wait for its end, cancel it, see its state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from quire.broker import Broker
from quire.connection import MAX_BLOCK_SECONDS
from quire.errors import OutputRewound, ProtocolError, QuireError, UnknownRequest
from quire.following import MAX_READINGS, Following, joined, raise_unless_completed
from quire.output import Completion, State, TokenChunk
from quire.transitions import RequestStatus


class Handle:
    """One request as its caller sees it. It holds no state but the id and may be thrown away."""

    def __init__(self, broker: Broker, request_id: str, *, known: bool = False) -> None:
        self.request_id = request_id
        self._broker = broker
        self._known = known

    def __repr__(self) -> str:
        return f"Handle({self.request_id!r})"

    def stream(self, *, after: int = 0, prefix_hash: str = "") -> Iterator[TokenChunk]:
        """Yields what is published after the first `after` tokens, until the request ends.

        A reader that stops reading changes nothing for the request: to end it, `cancel` it.

        Ends silently when the request completed. Otherwise raises Cancelled, DeadlineExceeded or
        RequestFailed after the last chunk; UnknownRequest or ResultExpired when the request is
        gone; OutputRewound when Redis lost tokens this reader had, even if others have come in
        their place, or never had as many as `after` says. That should be the `end` of a chunk; with
        the `prefix_hash` of that chunk a reader in another process notices a rewind, too.
        """
        for item in self.follow(after=after, prefix_hash=prefix_hash):
            if isinstance(item, Completion):
                raise_unless_completed(item)
                return
            yield item

    def follow(self, *, after: int = 0, prefix_hash: str = "") -> Iterator[TokenChunk | Completion]:
        """Like `stream`, and yields the completion after the last chunk, however the request ended.

        It has no text or tokens of the chunks, only its `tail`. Raises for a request that is gone
        or rewound, and not for one that failed.
        """
        following = Following(
            self.request_id, after=after, known=self._known, prefix_hash=prefix_hash
        )
        for item in _follow(self._broker, following):
            self._known = True
            yield item

    def result(self, *, timeout: float | None = None) -> Completion:
        """Waits for the end and returns the completion with all text and tokens joined.

        WaitTimeout after `timeout` seconds; the request goes on. For a request that did not
        complete the same errors as `stream`, carrying the completion.
        """
        following = Following(self.request_id, known=self._known, timeout=timeout)
        completion = _end_of(self._broker, following)
        raise_unless_completed(completion)
        return completion

    def cancel(self) -> State:
        """Cancels the request; returns its state after that. UnknownRequest."""
        return self._broker.cancel(self.request_id)

    def status(self) -> RequestStatus:
        """A snapshot of the request. UnknownRequest."""
        return self._broker.status(self.request_id)


def completion_of(broker: Broker, request_id: str) -> Completion | None:
    """The completion of a request that has ended, in whichever way; None if it is open again.

    Never waits. ResultExpired, ProtocolError.
    """
    for _ in range(MAX_READINGS):
        try:
            return _read_whole(broker, request_id)
        except OutputRewound:
            # It was requeued since the first read. Nothing of the earlier reading was returned.
            continue
    raise ProtocolError(f"{request_id}: its log changed again each time it was read")


def _read_whole(broker: Broker, request_id: str) -> Completion | None:
    following, chunks = Following(request_id, known=True), list[TokenChunk]()
    while True:
        read = broker.read_output(following.position).get(request_id)
        if read is None:
            status = _status(broker, request_id)
            if status is not None and not status.state.is_terminal:
                return None
            following.silent(status)
            continue
        for item in following.take(read):
            if isinstance(item, Completion):
                return joined(item, chunks)
            chunks.append(item)


def _end_of(broker: Broker, following: Following) -> Completion:
    chunks: list[TokenChunk] = []
    for item in _follow(broker, following):
        if isinstance(item, Completion):
            return joined(item, chunks)
        chunks.append(item)
    raise AssertionError("an output is followed to its end")


def _follow(broker: Broker, following: Following) -> Iterator[TokenChunk | Completion]:
    """The chunks after the follower's place as they come; the completion is the last item."""
    block: float | None = None
    while True:
        read = broker.read_output(following.position, block_seconds=block).get(following.request_id)
        if read is None:
            following.silent(_status(broker, following.request_id))
            if following.is_overdue:
                end_overdue(broker, following.request_id)
        else:
            for item in following.take(read):
                yield item
                if isinstance(item, Completion):
                    return
        left = following.patience.left(MAX_BLOCK_SECONDS)
        block = None if following.must_find_the_end else left


def end_overdue(broker: Broker, request_id: str) -> None:
    """Sees to the end of a request whose time is over.

    Whatever is wrong then is met by the next read. A user who may not do this waits for a worker.
    """
    with contextlib.suppress(QuireError):
        broker.end_overdue([request_id])


def _status(broker: Broker, request_id: str) -> RequestStatus | None:
    try:
        return broker.status(request_id)
    except UnknownRequest:
        return None
