"""A request as a coroutine sees it; the counterpart of handle.py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from quire.broker.async_broker import AsyncBroker
from quire.client.following import MAX_READINGS, Following, joined, raise_unless_completed
from quire.client.turns import Turn
from quire.errors import BrokerUnavailable, OutputRewound, ProtocolError, QuireError, UnknownRequest
from quire.transitions.output_log import OutputRead
from quire.transitions.values import RequestStatus
from quire.transport.connection import MAX_BLOCK_SECONDS
from quire.transport.patience import Patience
from quire.wire.output import Completion, State, TokenChunk

_Result = TypeVar("_Result")


class AsyncHandle:
    """One request as its caller sees it. It holds no state but the id and may be thrown away."""

    def __init__(self, broker: AsyncBroker, request_id: str, *, known: bool = False) -> None:
        self.request_id = request_id
        self._broker = broker
        self._known = known

    def __repr__(self) -> str:
        return f"AsyncHandle({self.request_id!r})"

    async def stream(self, *, after: int = 0, prefix_hash: str = "") -> AsyncIterator[TokenChunk]:
        """See `Handle.stream`."""
        async for item in self.follow(after=after, prefix_hash=prefix_hash):
            if isinstance(item, Completion):
                raise_unless_completed(item)
                return
            yield item

    async def follow(
        self, *, after: int = 0, prefix_hash: str = ""
    ) -> AsyncIterator[TokenChunk | Completion]:
        """See `Handle.follow`."""
        async for items in self.follow_reads(after=after, prefix_hash=prefix_hash):
            for item in items:
                yield item

    async def follow_reads(
        self, *, after: int = 0, prefix_hash: str = "", explains: bool = True
    ) -> AsyncIterator[Sequence[TokenChunk | Completion]]:
        """What `follow` gives, as much at a time as came together; never nothing.

        Of what came, only what one turn takes apart at a time: who stops in between holds the rest
        as it came. Unless it `explains`, nothing is logged where no worker is alive.
        """
        following = Following(
            self.request_id,
            after=after,
            known=self._known,
            prefix_hash=prefix_hash,
            outage_seconds=self._broker.outage_seconds,
            explains=explains,
        )
        async for items in _reads(self._broker, following):
            self._known = True
            yield items

    async def result(self, *, timeout: float | None = None) -> Completion:
        """See `Handle.result`."""
        following = Following(
            self.request_id,
            known=self._known,
            timeout=timeout,
            outage_seconds=self._broker.outage_seconds,
        )
        completion = await _end_of(self._broker, following)
        raise_unless_completed(completion)
        return completion

    async def cancel(self) -> State:
        """See `Handle.cancel`."""
        return await self._broker.cancel(self.request_id)

    async def status(self) -> RequestStatus:
        """A snapshot of the request. UnknownRequest."""
        return await self._broker.status(self.request_id)


async def completion_of(broker: AsyncBroker, request_id: str) -> Completion | None:
    """The completion of a request that has ended, however it did; None if it is open again.

    Never waits. ResultExpired, ProtocolError.
    """
    for _ in range(MAX_READINGS):
        try:
            return await _read_whole(broker, request_id)
        except OutputRewound:
            # It has had another life since the first read. Nobody was told of the one before.
            continue
    raise ProtocolError(f"{request_id}: its log changed again each time it was read")


async def _read_whole(broker: AsyncBroker, request_id: str) -> Completion | None:
    following, chunks = Following(request_id, known=True), list[TokenChunk]()
    while True:
        read = (await broker.read_output(following.position)).get(request_id)
        if read is None:
            status = await _status(broker, request_id)
            if status is not None and not status.state.is_terminal:
                return None
            following.silent(status)
            continue
        async for items in _turns(following.take(read)):
            for item in items:
                if isinstance(item, Completion):
                    return joined(item, chunks)
                chunks.append(item)


async def _end_of(broker: AsyncBroker, following: Following) -> Completion:
    chunks: list[TokenChunk] = []
    async for items in _reads(broker, following):
        for item in items:
            if isinstance(item, Completion):
                return joined(item, chunks)
            chunks.append(item)
    raise AssertionError("an output is followed to its end")


async def _reads(
    broker: AsyncBroker, following: Following
) -> AsyncIterator[Sequence[TokenChunk | Completion]]:
    """The chunks beyond the follower's place, turn by turn, and the completion, last."""
    patience, request_id = following.patience, following.request_id
    waits = False

    async def read_on() -> OutputRead | None:
        block = patience.left(MAX_BLOCK_SECONDS) if waits else None
        return (await broker.read_output(following.position, block_seconds=block)).get(request_id)

    while True:
        read = await bearing(patience, read_on)
        if read is None:
            following.silent(await bearing(patience, partial(_status, broker, request_id)))
            if following.is_overdue:
                await end_overdue(broker, request_id)
            elif following.is_queued:
                await explain(patience, broker)
        else:
            async for items in _turns(following.take(read)):
                yield items
                if isinstance(items[-1], Completion):
                    return
        # WaitTimeout also if the next read has nothing to wait for.
        patience.left(MAX_BLOCK_SECONDS)
        waits = not following.must_find_the_end


async def bearing(patience: Patience, read: Callable[[], Awaitable[_Result]]) -> _Result:
    """See `quire.client.handle.bearing`. A frozen server holds it no longer than its patience."""
    while True:
        try:
            result = await _within(patience, read)
        except BrokerUnavailable as error:
            pause = patience.bear(error)
        else:
            patience.answered()
            return result
        await asyncio.sleep(pause)


async def _within(patience: Patience, read: Callable[[], Awaitable[_Result]]) -> _Result:
    """The result of a read that may last as long as patience. WaitTimeout."""
    try:
        async with asyncio.timeout(patience.longest_call):
            return await read()
    except TimeoutError:
        patience.left(0.0)
        raise


async def explain(patience: Patience, broker: AsyncBroker) -> None:
    """See `quire.client.handle.explain`."""
    if patience.is_to_explain:
        reason = None
        with contextlib.suppress(QuireError):
            reason = await broker.absence()
        patience.explain(reason)


async def _turns(
    taking: Iterator[TokenChunk | Completion],
) -> AsyncIterator[list[TokenChunk | Completion]]:
    """The items, as many together as one turn takes apart; those before an error are good."""
    error: QuireError | None = None
    while error is None:
        items: list[TokenChunk | Completion] = []
        try:
            async with Turn() as turn:
                for item in taking:
                    items.append(item)
                    if turn.is_over:
                        await turn.next()
                        break
        except QuireError as found:
            error = found
        if items:
            yield items
        elif error is None:
            return
    raise error


async def end_overdue(broker: AsyncBroker, request_id: str) -> None:
    """See `quire.client.handle.end_overdue`."""
    with contextlib.suppress(QuireError):
        await broker.end_overdue([request_id])


async def _status(broker: AsyncBroker, request_id: str) -> RequestStatus | None:
    try:
        return await broker.status(request_id)
    except UnknownRequest:
        return None
