"""Follows the ends of a queue over all its shards, with a cursor or as a consumer of a group."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from quire.client.handle_async import retried
from quire.client.shard_cursor import SHARD_SECONDS, ShardCursor, cursors_in
from quire.errors import InvalidRequest, QuireError
from quire.queue.ends.telling import Delivery
from quire.queue.producer_async import AsyncProducer
from quire.transport.connection import MAX_BLOCK_SECONDS
from quire.transport.patience import Patience
from quire.wire.ends import End

#: After so many seconds without an acknowledgement another consumer takes an end over.
TAKE_OVER_SECONDS = 60.0

#: How often a consumer looks for such ends.
LOOK_SECONDS = 10.0

_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")


def ends_of(
    brokers: Sequence[AsyncProducer],
    *,
    after: str,
    group: str | None,
    consumer: str | None,
    timeout: float | None,
) -> AsyncIterator[End]:
    """See `AsyncClient.ends`. InvalidRequest at once."""
    if (group is None) != (consumer is None) or (group is not None and after):
        raise InvalidRequest("group", "give group and consumer, or a cursor, or nothing")
    if group is None or consumer is None:
        cursors = cursors_in(after, num_shards=len(brokers))
        return _CursorReader(brokers, timeout=timeout).ends(cursors)
    for field, name in (("group", group), ("consumer", consumer)):
        if not _NAME.fullmatch(name):
            raise InvalidRequest(field, f"must match {_NAME.pattern}")
    return _Consumer(brokers, group, consumer, timeout=timeout).ends()


class _Reader:
    """What both kinds of readers have. A reader of ends outlasts an outage of Redis."""

    def __init__(self, brokers: Sequence[AsyncProducer], *, timeout: float | None) -> None:
        self._brokers = brokers
        self._timeout = timeout
        # There is nothing to explain: a queue without ends is no riddle.
        seconds = brokers[0].outage_seconds
        self._patience = Patience(None, "the ends", outage_seconds=seconds, explains=False)
        self._shard_seconds = MAX_BLOCK_SECONDS if len(brokers) == 1 else SHARD_SECONDS


class _CursorReader(_Reader):
    """One reader with a cursor: those of all shards, separated by commas."""

    async def ends(self, cursors: Sequence[ShardCursor]) -> AsyncIterator[End]:
        """Each end, until there was none for `timeout` seconds."""
        give_up = _Deadline(self._timeout)
        while True:
            has_news = False
            for broker, cursor in zip(self._brokers, cursors, strict=True):
                for end in await self._new_ends(broker, cursor):
                    has_news = True
                    cursor.add(end)
                    yield replace(end, position=",".join(map(str, cursors)))
            if has_news:
                give_up = _Deadline(self._timeout)
                continue
            for broker, cursor in zip(self._brokers, cursors, strict=True):
                seconds = give_up.left(self._shard_seconds)
                if seconds is None:
                    return
                if await self._read(broker, cursor.newest, block_seconds=seconds):
                    break

    async def _new_ends(self, broker: AsyncProducer, cursor: ShardCursor) -> Sequence[End]:
        while True:
            ends = cursor.unseen(await self._read(broker, cursor.before_newest))
            if ends is not None:
                return ends

    async def _read(
        self, broker: AsyncProducer, after: str, *, block_seconds: float | None = None
    ) -> Sequence[End]:
        read = partial(broker.told, after=after, block_seconds=block_seconds)
        return await retried(self._patience, read)


class _Consumer(_Reader):
    """One consumer of a group. An end counts as handled when the next one is asked for."""

    def __init__(
        self, brokers: Sequence[AsyncProducer], group: str, consumer: str, *, timeout: float | None
    ) -> None:
        super().__init__(brokers, timeout=timeout)
        self._group = group
        self._names = group, consumer
        #: Handled and not acknowledged yet: the shard's broker, and positions.
        self._handled: dict[AsyncProducer, list[str]] = {broker: [] for broker in brokers}

    async def ends(self) -> AsyncIterator[End]:
        """Each end, until there was none for `timeout` seconds.

        Begins with those that this consumer had not acknowledged when it ended.
        """
        try:
            async for broker, delivery in self._deliveries():
                handled = self._handled[broker]
                handled += sorted({*delivery.positions} - {end.position for end in delivery.ends})
                for end in delivery.ends:
                    yield end
                    handled.append(end.position)
                await retried(self._patience, self._acknowledge)
        finally:
            # Without it, the last ends come again.
            with contextlib.suppress(QuireError):
                await self._acknowledge()

    async def _deliveries(self) -> AsyncIterator[tuple[AsyncProducer, Delivery]]:
        """What this consumer must handle, by shard; some deliveries are empty.

        First those that it has not acknowledged, until there are none: the caller acknowledges each
        delivery before it asks for the next. Then new ones, and every LOOK_SECONDS those that other
        consumers have left. Ends after `timeout` seconds without news.
        """
        for broker in self._brokers:
            unacknowledged = partial(broker.delivered, *self._names)
            while (found := await self._read(unacknowledged)).positions:
                yield broker, found
        give_up, next_look = _Deadline(self._timeout), _Deadline(0.0)
        while True:
            has_news, seconds = False, give_up.left(min(self._shard_seconds, LOOK_SECONDS))
            if next_look.is_over:
                for broker in self._brokers:
                    abandoned = partial(
                        broker.take_over, *self._names, idle_seconds=TAKE_OVER_SECONDS
                    )
                    found = await self._read(abandoned)
                    has_news |= bool(found.positions)
                    yield broker, found
                next_look = _Deadline(LOOK_SECONDS)
            for broker in self._brokers:
                # Once the time is over, a last read that does not wait.
                new = partial(broker.deliver, *self._names, block_seconds=seconds)
                found = await self._read(new)
                has_news |= bool(found.positions)
                yield broker, found
            if has_news:
                give_up = _Deadline(self._timeout)
            elif seconds is None:
                return

    async def _read(self, read: Callable[[], Awaitable[Delivery]]) -> Delivery:
        return await retried(self._patience, read)

    async def _acknowledge(self) -> None:
        for broker, positions in self._handled.items():
            if positions:
                await broker.acknowledge(self._group, positions.copy())
                positions.clear()


class _Deadline:
    """Is over after so many seconds; never with None."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self._end is not None and time.monotonic() >= self._end

    def left(self, longest_seconds: float) -> float | None:
        """For how many seconds a read may wait; None once the time is over."""
        if self._end is None:
            return longest_seconds
        left = self._end - time.monotonic()
        return min(left, longest_seconds) if left > 0 else None
