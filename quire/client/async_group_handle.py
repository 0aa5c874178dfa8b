"""A group of requests as a coroutine sees it; the counterpart of group_handle.py."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

from quire.broker.async_broker import AsyncBroker
from quire.broker.grouping import EndsPlace, GroupEnd
from quire.client.async_handle import bearing, completion_of, explain
from quire.client.group_handle import TURN_SECONDS, forgotten, unreadable
from quire.errors import ProtocolError, QuireError, ResultExpired
from quire.transport.connection import MAX_BLOCK_SECONDS
from quire.transport.patience import Patience
from quire.wire.output import Completion, State


class AsyncGroupHandle:
    """One group. It holds no state but the name and may be thrown away; see `GroupHandle`."""

    def __init__(self, brokers: Sequence[AsyncBroker], group: str) -> None:
        self.group = group
        self._brokers = brokers

    def __repr__(self) -> str:
        return f"AsyncGroupHandle({self.group!r})"

    async def counts(self) -> dict[State, int]:
        """See `GroupHandle.counts`."""
        total = Counter[State]()
        for broker in self._brokers:
            total.update(await broker.group_counts(self.group))
        return dict(total)

    async def results(self, *, timeout: float | None = None) -> AsyncIterator[Completion]:
        """See `GroupHandle.results`."""
        patience, told = self._patience(timeout), set[str]()
        async for broker, end in self._ends(patience):
            if end.request_id in told:
                continue
            completion: Completion | None
            try:
                look = partial(completion_of, broker, end.request_id)
                completion = await bearing(patience, look)
            except ResultExpired:
                completion = forgotten(end)
            except ProtocolError as error:
                completion = unreadable(end, error)
            # One that was requeued is open again; its later end is still to come.
            if completion is not None:
                told.add(end.request_id)
                yield completion

    async def wait(self, *, timeout: float | None = None) -> dict[State, int]:
        """See `GroupHandle.wait`."""
        patience = self._patience(timeout)
        async for _ in self._ends(patience):
            pass
        return await bearing(patience, self.counts)

    async def cancel(self) -> int:
        """See `GroupHandle.cancel`."""
        num_open = 0
        for broker in self._brokers:
            members = await broker.open_members(self.group)
            num_open += len(await broker.cancel_many(members))
        return num_open

    def _patience(self, timeout: float | None) -> Patience:
        outage_seconds = self._brokers[0].outage_seconds
        return Patience(timeout, f"the group {self.group}", outage_seconds=outage_seconds)

    async def _ends(self, patience: Patience) -> AsyncIterator[tuple[AsyncBroker, GroupEnd]]:
        """The ends of members as they come, until none is open."""
        places = {broker: EndsPlace() for broker in self._brokers}
        while True:
            # Looked at before the ends: whatever ended before the look is found by the reads.
            waiting = [
                broker
                for broker in places
                if await bearing(patience, partial(broker.num_open_members, self.group))
            ]
            has_news = False
            for broker, place in places.items():
                read = partial(broker.read_ends, self.group, after=place.overlap)
                ends = place.take(await bearing(patience, read))
                has_news = has_news or ends is None or bool(ends)
                for end in ends or ():
                    yield broker, end
            if has_news:
                patience.has_news()
                continue
            if not waiting:
                return
            if not await self._has_come(waiting, places, patience):
                for broker in waiting:
                    # What is wrong then is met by the next read; see `end_overdue` of handles.
                    with contextlib.suppress(QuireError):
                        await broker.end_overdue(await broker.overdue(self.group))
                await explain(patience, waiting[0])

    async def _has_come(
        self,
        waiting: Sequence[AsyncBroker],
        places: Mapping[AsyncBroker, EndsPlace],
        patience: Patience,
    ) -> bool:
        """Waits for an end at each shard in turn; returns whether one has come."""
        turn = MAX_BLOCK_SECONDS if len(places) == 1 else TURN_SECONDS
        for broker in waiting:

            async def wait(broker: AsyncBroker = broker) -> list[GroupEnd]:
                after, left = places[broker].position, patience.left(turn)
                return await broker.read_ends(self.group, after=after, block_seconds=left)

            if await bearing(patience, wait):
                return True
        return False
