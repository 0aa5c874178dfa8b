"""The handle of a request: follow its output, wait for its end, cancel it, get its status."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from quire.client.following import MAX_READINGS, Following, joined_items, raise_unless_completed
from quire.client.steps import AnyBroker, BrokerCall, Collect, Pause, in_thread
from quire.errors import BrokerUnavailable, OutputRewound, ProtocolError, QuireError, UnknownRequest
from quire.queue.broker import Broker
from quire.queue.publish.output_log import OutputRead
from quire.queue.request.status import RequestStatus
from quire.transport.connection import MAX_BLOCK_SECONDS
from quire.transport.patience import Patience
from quire.transport.procedure import Procedure, run
from quire.wire.output import Completion, State, TokenChunk

_Result = TypeVar("_Result")


class Handle:
    """One request. The handle has no state but the id, so it may be discarded."""

    def __init__(self, broker: Broker, request_id: str, *, known: bool = False) -> None:
        self.request_id = request_id
        self._broker = broker
        self._known = known

    def __repr__(self) -> str:
        return f"Handle({self.request_id!r})"

    def stream(self, *, after: int = 0, prefix_hash: str = "") -> Iterator[TokenChunk]:
        """Yields what is published after the first `after` tokens, until the request ends.

        If the reader stops, the request continues; to end it, `cancel` it. While Redis does not
        answer, the reader waits for up to a minute (30 times the `retry_seconds` of the client),
        and then raises BrokerUnavailable.

        Returns after the last chunk if the request completed. Otherwise raises Cancelled,
        DeadlineExceeded or RequestFailed after the last chunk. UnknownRequest or ResultExpired if
        the request does not exist. OutputRewound if Redis lost tokens that this reader had, even if
        other tokens have replaced them, or if the log never had `after` tokens.

        `after` should be the `end` of a chunk. With the `prefix_hash` of that chunk, a reader in
        another process notices a rewind, too.
        """
        for item in self.follow(after=after, prefix_hash=prefix_hash):
            if isinstance(item, Completion):
                raise_unless_completed(item)
                return
            yield item

    def follow(self, *, after: int = 0, prefix_hash: str = "") -> Iterator[TokenChunk | Completion]:
        """Like `stream`, but yields the completion after the last chunk, whatever its state.

        The completion has only its `tail`, without text and tokens of the chunks. Raises if the
        request does not exist or was rewound, but not if it failed.
        """
        following = Following(
            self.request_id,
            after=after,
            known=self._known,
            prefix_hash=prefix_hash,
            outage_seconds=self._broker.outage_seconds,
        )
        while not following.has_ended:
            read = run(next_read(self._broker, following), in_thread)
            for item in following.take(read):
                self._known = True
                yield item

    def result(self, *, timeout: float | None = None) -> Completion:
        """Waits for the end, and returns the completion with all text and tokens.

        WaitTimeout after `timeout` seconds; the request continues. During an outage of Redis the
        wait continues until its timeout; without a timeout it ends after a minute, as `stream`
        does. If no worker is alive after a second, this is logged once as a warning. If the request
        did not complete, raises the same errors as `stream`, with the completion.
        """
        following = Following(
            self.request_id,
            known=self._known,
            timeout=timeout,
            outage_seconds=self._broker.outage_seconds,
        )
        completion = run(end_of(self._broker, following), in_thread)
        raise_unless_completed(completion)
        return completion

    def cancel(self) -> State:
        """Cancels the request; returns its state after that. UnknownRequest."""
        return self._broker.cancel(self.request_id)

    def status(self) -> RequestStatus:
        """A snapshot of the request. UnknownRequest."""
        return self._broker.status(self.request_id)


def retrying(patience: Patience, read: Callable[[], _Result]) -> _Result:
    """See `retried`, in a thread."""
    result: _Result = run(retried(patience, read), in_thread)
    return result


def explain(patience: Patience, broker: Broker) -> None:
    """See `explaining`, in a thread."""
    run(explaining(patience, broker), in_thread)


# For both kinds of handle.


def next_read(broker: AnyBroker, following: Following) -> Procedure[OutputRead]:
    """Waits until there is something after what was read.

    Meanwhile it reads the status from time to time, ends an overdue request, and reports if no
    worker is there. The errors are those of Following and of `retried`.
    """
    patience, request_id = following.patience, following.request_id

    def read_on() -> Any:
        block = following.longest_wait(MAX_BLOCK_SECONDS)
        return broker.read_output(following.position, block_seconds=block)

    while True:
        read: OutputRead | None = (yield from retried(patience, read_on)).get(request_id)
        if read is not None:
            return read
        following.silent((yield from retried(patience, partial(_status, broker, request_id))))
        if following.is_overdue:
            yield from _end_overdue(broker, request_id)
        elif following.is_queued:
            yield from explaining(patience, broker)


def end_of(broker: AnyBroker, following: Following) -> Procedure[Completion]:
    """Waits for the end. The completion has all text and tokens. See `next_read`."""
    items: list[TokenChunk | Completion] = []
    while not following.has_ended:
        read = yield from next_read(broker, following)
        items += yield Collect(following.take(read))
    return joined_items(items)


def completion_of(broker: AnyBroker, request_id: str) -> Procedure[Completion | None]:
    """The completion of a request that has ended, in any state; None if it is open again.

    Never waits. ResultExpired, ProtocolError.
    """
    for _ in range(MAX_READINGS):
        try:
            return (yield from _read_whole(broker, request_id))
        except OutputRewound:
            # It was requeued since the first read. Nothing of that reading was returned.
            continue
    raise ProtocolError(f"{request_id}: its log was rewritten during each of {MAX_READINGS} reads")


def _read_whole(broker: AnyBroker, request_id: str) -> Procedure[Completion | None]:
    following, items = Following(request_id, known=True), list[TokenChunk | Completion]()
    while not following.has_ended:
        reads = yield BrokerCall(partial(broker.read_output, following.position))
        if (read := reads.get(request_id)) is not None:
            items += yield Collect(following.take(read))
            continue
        status = yield from _status(broker, request_id)
        if status is not None and not status.state.is_terminal:
            return None
        following.silent(status)
    return joined_items(items)


def retried(patience: Patience, read: Callable[[], Any]) -> Procedure[Any]:
    """Repeats a read while Redis does not answer and patience lasts; returns its result.

    Only for what may be repeated. BrokerUnavailable, WaitTimeout; see `Patience.bear`. If the
    server is frozen, a thread waits until its socket times out, and an event loop only until
    patience runs out.
    """
    while True:
        try:
            result = yield BrokerCall(read, patience.longest_call)
        except BrokerUnavailable as error:
            pause = patience.bear(error)
        except TimeoutError:
            patience.left(0.0)
            raise
        else:
            patience.answered()
            return result
        yield Pause(pause)


def explaining(patience: Patience, broker: AnyBroker) -> Procedure[None]:
    """Finds out once, when it is time, why no worker takes requests of this shard."""
    if patience.is_to_explain:
        reason = None
        # An error here is not raised, because the next read raises it if it lasts.
        with contextlib.suppress(QuireError):
            reason = yield BrokerCall(broker.absence)
        patience.explain(reason)


def _end_overdue(broker: AnyBroker, request_id: str) -> Procedure[None]:
    """Ends an overdue request.

    Errors are ignored: if one lasts, the next read raises it. A Redis user may lack the right to
    end a request; then a worker ends it.
    """
    with contextlib.suppress(QuireError):
        yield BrokerCall(partial(broker.end_overdue, [request_id]))


def _status(broker: AnyBroker, request_id: str) -> Procedure[RequestStatus | None]:
    try:
        status: RequestStatus = yield BrokerCall(partial(broker.status, request_id))
    except UnknownRequest:
        return None
    return status
