"""The handle of a request: follow its output, wait for its end, cancel it, see its state."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from quire.broker.broker import Broker
from quire.client.following import MAX_READINGS, Following, joined, raise_unless_completed
from quire.errors import BrokerUnavailable, OutputRewound, ProtocolError, QuireError, UnknownRequest
from quire.transitions.output_log import OutputRead
from quire.transitions.values import RequestStatus
from quire.transport.connection import MAX_BLOCK_SECONDS
from quire.transport.patience import Patience
from quire.wire.output import Completion, State, TokenChunk

_Result = TypeVar("_Result")


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

        While Redis does not answer it waits on, for up to a minute (30 times the `retry_seconds` of
        the client), and then raises BrokerUnavailable. Ends silently when the request completed.
        Otherwise raises Cancelled, DeadlineExceeded or RequestFailed after the last chunk;
        UnknownRequest or ResultExpired when the request is gone; OutputRewound when Redis lost
        tokens this reader had, even if others have come in their place, or never had as many as
        `after` says. That should be the `end` of a chunk; with
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
            self.request_id,
            after=after,
            known=self._known,
            prefix_hash=prefix_hash,
            outage_seconds=self._broker.outage_seconds,
        )
        for item in _follow(self._broker, following):
            self._known = True
            yield item

    def result(self, *, timeout: float | None = None) -> Completion:
        """Waits for the end and returns the completion with all text and tokens joined.

        WaitTimeout after `timeout` seconds; the request goes on. An outage of Redis does not end
        the wait before; one without a timeout ends after a minute of it, as `stream`. A wait of
        more than a second without a worker that could end it is logged as a warning, once. For a
        request that did not complete the same errors as `stream`, carrying the completion.
        """
        following = Following(
            self.request_id,
            known=self._known,
            timeout=timeout,
            outage_seconds=self._broker.outage_seconds,
        )
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
    patience, request_id = following.patience, following.request_id
    waits = False

    def read_on() -> OutputRead | None:
        block = patience.left(MAX_BLOCK_SECONDS) if waits else None
        return broker.read_output(following.position, block_seconds=block).get(request_id)

    while True:
        read = bearing(patience, read_on)
        if read is None:
            following.silent(bearing(patience, partial(_status, broker, request_id)))
            if following.is_overdue:
                end_overdue(broker, request_id)
            elif following.is_queued:
                explain(patience, broker)
        else:
            for item in following.take(read):
                yield item
                if isinstance(item, Completion):
                    return
        # WaitTimeout also if the next read has nothing to wait for.
        patience.left(MAX_BLOCK_SECONDS)
        waits = not following.must_find_the_end


def bearing(patience: Patience, read: Callable[[], _Result]) -> _Result:
    """The result of a read, which is made again while Redis does not answer and patience lasts.

    Only for what may be repeated. BrokerUnavailable, WaitTimeout; see `Patience.bear`.
    """
    while True:
        try:
            result = read()
        except BrokerUnavailable as error:
            time.sleep(patience.bear(error))
        else:
            patience.answered()
            return result


def explain(patience: Patience, broker: Broker) -> None:
    """Looks once, when it is time, why nothing comes from this shard."""
    if patience.is_to_explain:
        reason = None
        # It says why another call fails, at most; that one will say so itself.
        with contextlib.suppress(QuireError):
            reason = broker.absence()
        patience.explain(reason)


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
