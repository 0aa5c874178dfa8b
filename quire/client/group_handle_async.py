"""The handle of a group of requests: its progress, and its results in the order of their ends.

    group = await quire.submit_many(rows, group="eval-7")
    async for completion in group.results():
        print(completion.request_id, completion.state, completion.text)

Any process that knows the name of a group gets a handle from `AsyncClient.attach_group`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from functools import partial

from quire.client.handle_async import completion_of, explain, retried
from quire.client.shard_cursor import SHARD_SECONDS
from quire.errors import ProtocolError, QuireError, ResultExpired
from quire.queue.groups.grouping import EndsCursor, GroupEnd
from quire.queue.producer_async import AsyncProducer
from quire.transport.connection import MAX_BLOCK_SECONDS
from quire.transport.patience import Patience
from quire.wire.output import Completion, ErrorInfo, FinishReason, State


class AsyncGroupHandle:
    """One group. The handle has no state but the name, so it may be discarded.

    The transitions of the members update the counts, so they always add up to the number of
    requests. A group expires with its last member. A group that does not exist has no members, and
    a wait for it ends at once.
    """

    def __init__(self, brokers: Sequence[AsyncProducer], group: str) -> None:
        self.group = group
        self._brokers = brokers

    def __repr__(self) -> str:
        return f"AsyncGroupHandle({self.group!r})"

    async def counts(self) -> dict[State, int]:
        """How many of its requests are in each state, without states that have none."""
        total = Counter[State]()
        for broker in self._brokers:
            total.update(await broker.group_counts(self.group))
        return dict(total)

    async def results(self, *, timeout: float | None = None) -> AsyncIterator[Completion]:
        """Yields the completion of every member, with its text, when it ends.

        Begins with the members that have ended already, and returns after the last one. Members
        that failed, expired or were cancelled are included; nothing is raised for them. If the
        result has expired, the completion has the error `result_expired`; if it cannot be read, the
        state is failed and the error `damaged`. Each member is returned once, even if it is
        requeued later. WaitTimeout after `timeout` seconds.
        """
        reading, given = _Reading(self._brokers, self.group, timeout=timeout), set[str]()
        async for broker, end in reading.ends():
            if end.request_id in given:
                continue
            completion = await reading.completion_of(broker, end)
            # A requeued member is open again; its next end is read later.
            if completion is not None:
                given.add(end.request_id)
                yield completion

    async def wait(self, *, timeout: float | None = None) -> dict[State, int]:
        """Waits until all members have ended; returns their counts. WaitTimeout."""
        reading = _Reading(self._brokers, self.group, timeout=timeout)
        async for _ in reading.ends():
            pass
        return await retried(reading.patience, self.counts)

    async def cancel(self) -> int:
        """Cancels every open member; returns how many were open."""
        num_open = 0
        for broker in self._brokers:
            members = await broker.open_members(self.group)
            num_open += len(await broker.cancel_many(members))
        return num_open


class _Reading:
    """One reader of a group. `timeout` starts when it is made."""

    def __init__(
        self, brokers: Sequence[AsyncProducer], group: str, *, timeout: float | None
    ) -> None:
        self._group = group
        self._cursors = {broker: EndsCursor() for broker in brokers}
        outage_seconds = brokers[0].outage_seconds
        self.patience = Patience(timeout, f"the group {group}", outage_seconds=outage_seconds)

    async def ends(self) -> AsyncIterator[tuple[AsyncProducer, GroupEnd]]:
        """The end of each member, with the broker of its shard, until none is open."""
        patience = self.patience
        while True:
            # Counted before the ends are read, so that the reads find every end before the count.
            waiting = [
                broker
                for broker in self._cursors
                if await retried(patience, partial(broker.num_open_members, self._group))
            ]
            has_news = False
            for broker, cursor in self._cursors.items():
                read = partial(broker.read_ends, self._group, after=cursor.overlap)
                ends = cursor.take(await retried(patience, read))
                has_news = has_news or ends is None or bool(ends)
                for end in ends or ():
                    yield broker, end
            if has_news:
                patience.has_news()
            elif not waiting:
                return
            elif not await self._has_come(waiting):
                await self._end_overdue(waiting)
                await explain(patience, waiting[0])

    async def completion_of(self, broker: AsyncProducer, end: GroupEnd) -> Completion | None:
        """The completion of a member, also if it cannot be read; None if it is open again."""
        try:
            return await retried(self.patience, partial(completion_of, broker, end.request_id))
        except ResultExpired:
            error = ErrorInfo("result_expired", "the retention of the result has passed")
            return Completion(end.request_id, end.state, FinishReason.ERROR, error=error)
        except ProtocolError as damage:
            error = ErrorInfo("damaged", str(damage))
            return Completion(end.request_id, State.FAILED, FinishReason.ERROR, error=error)

    async def _has_come(self, waiting: Sequence[AsyncProducer]) -> bool:
        """Waits for an end in each shard in turn; returns whether there was one."""
        longest = MAX_BLOCK_SECONDS if len(self._cursors) == 1 else SHARD_SECONDS
        for broker in waiting:

            def wait(broker: AsyncProducer = broker) -> Awaitable[Sequence[GroupEnd]]:
                after, left = self._cursors[broker].position, self.patience.left(longest)
                return broker.read_ends(self._group, after=after, block_seconds=left)

            if await retried(self.patience, wait):
                return True
        return False

    async def _end_overdue(self, waiting: Sequence[AsyncProducer]) -> None:
        for broker in waiting:
            # A lasting error is raised by the next read.
            with contextlib.suppress(QuireError):
                await broker.end_overdue(await broker.overdue(self._group))
