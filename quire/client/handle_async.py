"""The handle of a request: follow its output, wait for its end, cancel it, get its status."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

from quire.client.following import MAX_READINGS, Following, joined_items, raise_unless_completed
from quire.errors import BrokerUnavailable, OutputRewound, ProtocolError, QuireError, UnknownRequest
from quire.queue.producer_async import AsyncProducer
from quire.queue.publish.output_log import OutputRead
from quire.queue.request.status import RequestStatus
from quire.transport.concurrency_async import aside, in_turns, list_of, pause, timeout
from quire.transport.connection import MAX_BLOCK_SECONDS
from quire.transport.patience import Patience
from quire.wire.output import Completion, State, TokenChunk

_Result = TypeVar("_Result")


class AsyncHandle:
    """One request. The handle has no state but the id, so it may be discarded."""

    def __init__(self, broker: AsyncProducer, request_id: str, *, known: bool = False) -> None:
        self.request_id = request_id
        self._broker = broker
        self._known = known

    def __repr__(self) -> str:
        return f"AsyncHandle({self.request_id!r})"

    async def stream(self, *, after: int = 0, prefix_hash: str = "") -> AsyncIterator[TokenChunk]:
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
        async for item in self.follow(after=after, prefix_hash=prefix_hash):
            if isinstance(item, Completion):
                raise_unless_completed(item)
                return
            yield item

    async def follow(
        self, *, after: int = 0, prefix_hash: str = ""
    ) -> AsyncIterator[TokenChunk | Completion]:
        """Like `stream`, but yields the completion after the last chunk, whatever its state.

        The completion has only its `tail`, without text and tokens of the chunks. Raises if the
        request does not exist or was rewound, but not if it failed.
        """
        async for items in self.follow_reads(after=after, prefix_hash=prefix_hash):
            for item in items:
                yield item

    async def follow_reads(
        self,
        *,
        after: int = 0,
        prefix_hash: str = "",
        explains: bool = True,
        gate: AbstractAsyncContextManager[Any] | None = None,
    ) -> AsyncIterator[Sequence[TokenChunk | Completion]]:
        """The items of `follow`, in non-empty lists of items that were decoded together.

        If the caller stops, the rest is not decoded. With `explains` False, no warning is logged if
        no worker is alive. What one read brought is decoded and given inside the `gate`, such as a
        lock that several readers share: then only one of them holds decoded items that its caller
        has not come to.
        """
        following = Following(
            self.request_id,
            after=after,
            known=self._known,
            prefix_hash=prefix_hash,
            outage_seconds=self._broker.outage_seconds,
            explains=explains,
        )
        while not following.has_ended:
            read = await next_read(self._broker, following)
            taken = following.take(read)
            async with gate or nullcontext():
                if read.begins_long:
                    # Others would wait for it: it cannot be taken apart in turns.
                    first = await aside(next, taken, None)
                    if first is not None:
                        self._known = True
                        yield [first]
                async for items in in_turns(taken):
                    self._known = True
                    yield items

    async def result(self, *, timeout: float | None = None) -> Completion:
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
        items: list[TokenChunk | Completion] = []
        while not following.has_ended:
            read = await next_read(self._broker, following)
            items += await list_of(following.take(read))
        completion = joined_items(items)
        raise_unless_completed(completion)
        return completion

    async def cancel(self) -> State:
        """Cancels the request; returns its state after that. UnknownRequest."""
        return await self._broker.cancel(self.request_id)

    async def status(self) -> RequestStatus:
        """A snapshot of the request. UnknownRequest."""
        return await self._broker.status(self.request_id)


async def next_read(broker: AsyncProducer, following: Following) -> OutputRead:
    """Waits until there is something after what was read.

    Meanwhile it reads the status from time to time, ends an overdue request, and reports if no
    worker is there. The errors are those of Following and of `retried`.
    """
    patience, request_id = following.patience, following.request_id

    def read_on() -> Awaitable[dict[str, OutputRead]]:
        block = following.longest_wait(MAX_BLOCK_SECONDS)
        return broker.read_output(following.position, block_seconds=block)

    while True:
        read = (await retried(patience, read_on)).get(request_id)
        if read is not None:
            return read
        following.silent(await retried(patience, partial(_status, broker, request_id)))
        if following.is_overdue:
            await _end_overdue(broker, request_id)
        elif following.is_queued:
            await explain(patience, broker)


async def completion_of(broker: AsyncProducer, request_id: str) -> Completion | None:
    """The completion of a request that has ended, in any state; None if it is open again.

    Never waits. ResultExpired, ProtocolError.
    """
    for _ in range(MAX_READINGS):
        try:
            return await _read_whole(broker, request_id)
        except OutputRewound:
            # It was requeued since the first read. Nothing of that reading was returned.
            continue
    raise ProtocolError(f"{request_id}: its log was rewritten during each of {MAX_READINGS} reads")


async def _read_whole(broker: AsyncProducer, request_id: str) -> Completion | None:
    following, items = Following(request_id, known=True), list[TokenChunk | Completion]()
    while not following.has_ended:
        read = (await broker.read_output(following.position)).get(request_id)
        if read is not None:
            items += await list_of(following.take(read))
            continue
        status = await _status(broker, request_id)
        if status is not None and not status.state.is_terminal:
            return None
        following.silent(status)
    return joined_items(items)


async def retried(patience: Patience, read: Callable[[], Awaitable[_Result]]) -> _Result:
    """Repeats a read while Redis does not answer and patience lasts; returns its result.

    Only for what may be repeated. BrokerUnavailable, WaitTimeout; see `Patience.bear`. If the
    server is frozen, a thread waits until its socket times out, and an event loop only until
    patience runs out.
    """
    while True:
        try:
            async with timeout(patience.longest_call):
                result = await read()
        except BrokerUnavailable as error:
            seconds = patience.bear(error)
        except TimeoutError:
            patience.left(0.0)
            raise
        else:
            patience.answered()
            return result
        await pause(seconds)


async def explain(patience: Patience, broker: AsyncProducer) -> None:
    """Finds out once, when it is time, why no worker takes requests of this shard."""
    if patience.is_to_explain:
        reason = None
        # An error here is not raised, because the next read raises it if it lasts.
        with contextlib.suppress(QuireError):
            reason = await broker.absence()
        patience.explain(reason)


async def _end_overdue(broker: AsyncProducer, request_id: str) -> None:
    """Ends an overdue request.

    Errors are ignored: if one lasts, the next read raises it. A Redis user may lack the right to
    end a request; then a worker ends it.
    """
    with contextlib.suppress(QuireError):
        await broker.end_overdue([request_id])


async def _status(broker: AsyncProducer, request_id: str) -> RequestStatus | None:
    try:
        return await broker.status(request_id)
    except UnknownRequest:
        return None
