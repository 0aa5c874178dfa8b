"""The producer's side of one queue shard: submit, cancel, wait for ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.queue.ends import telling
from quire.queue.ends.telling import Delivery
from quire.queue.groups import grouping
from quire.queue.groups.grouping import GroupEnd, GroupProgress
from quire.queue.lease.expire import end_overdue
from quire.queue.side_async import AsyncSide
from quire.queue.streams import FIRST_CURSOR, at_most
from quire.queue.submit.cancel import cancel_many, cancelling, discarding
from quire.queue.submit.pictures import reading
from quire.queue.submit.submit import Submitted, submit_call, submitting
from quire.transport.concurrency_async import list_of
from quire.wire.ends import End
from quire.wire.message import Message
from quire.wire.output import State
from quire.wire.protocol import GenerationRequest


class AsyncProducer(AsyncSide):
    """Submits requests, cancels them, and reads their results and ends."""

    async def submit(self, request: GenerationRequest) -> Submitted:
        """Enqueues a request once, however often it is called with the same id.

        InvalidRequest if it cannot be encoded; the body is not checked here. QueueFull if a limit
        of the backlog or Redis' memory limit is reached; then nothing was enqueued.
        """
        (submitted,) = await self.submit_many([request])
        return submitted

    async def submit_many(self, requests: Sequence[GenerationRequest]) -> list[Submitted]:
        """Enqueues many requests in few round trips.

        QueueFull if one was refused; its `accepted` are the ids of those that were enqueued.
        Calling again with the same requests is safe.
        """
        return await self.submit_messages(await list_of(map(Message.of, requests)))

    async def submit_messages(self, messages: Sequence[Message]) -> list[Submitted]:
        """Like `submit_many`, for requests that are already encoded."""
        calls = await list_of(submit_call(self.keys, message) for message in messages)
        return await self.run(submitting(self.keys, messages, calls))

    async def pictures(self, digests: Sequence[str]) -> Mapping[str, bytes]:
        """The stored pictures with these digests; the result has none that has expired."""
        return await self.run(reading(self.keys, digests))

    async def cancel(self, request_id: str) -> State:
        """Cancels a request; returns its state after that.

        A waiting request is `cancelled` at once. A running one stays `running` until its worker
        sees the flag at its next commit or heartbeat. A terminal one does not change.
        UnknownRequest.
        """
        return await self.run(cancelling(self.keys, request_id))

    async def cancel_many(self, request_ids: Sequence[str]) -> dict[str, State]:
        """Cancels many requests in few round trips; the result has no unknown ones."""
        return await self.run(cancel_many(self.keys, request_ids))

    async def discard(self, request_id: str) -> State:
        """Deletes what was kept with a request, and after its end the record and the output too.

        Returns the state before. Nothing else of an open request changes: cancel it first, and call
        this again after its end. Not for requests of groups: InvalidRequest. UnknownRequest.
        """
        return await self.run(discarding(self.keys, request_id))

    async def end_overdue(self, request_ids: Sequence[str]) -> dict[str, State]:
        """Ends the requests that are overdue and held by no worker; returns the states of these.

        A request is overdue if it is past its deadline, too long in the queue, or was cancelled and
        its worker is dead. Every reader that waits for it may call this at any time.
        """
        return await self.run(end_overdue(self.keys, request_ids))

    # Groups. Each shard has only its own part of a group.

    async def group_counts(self, group: str) -> dict[State, int]:
        """How many of the group's requests are in each state; empty if the group does not exist."""
        return await self.run(grouping.group_counts(self.keys, group))

    async def group_progress(self, group: str) -> GroupProgress:
        """The counts of the group, how many ends it has had, and the last one."""
        return await self.run(grouping.group_progress(self.keys, group))

    async def open_members(self, group: str) -> list[str]:
        """The ids of the group's requests that have not ended, sorted."""
        return await self.run(grouping.open_members(self.keys, group))

    async def num_open_members(self, group: str) -> int:
        """How many of the group's requests have not ended."""
        return await self.run(grouping.num_open_members(self.keys, group))

    async def read_ends(
        self, group: str, *, after: str = FIRST_CURSOR, block_seconds: float | None = None
    ) -> list[GroupEnd]:
        """The ends after a cursor, in order; waits for one as `read_output` does.

        A read that waits uses a connection of its own meanwhile.
        """
        block = at_most(block_seconds, self._longest_block)
        return await self.run(
            grouping.read_ends(self.keys, group, after=after, block_seconds=block)
        )

    async def overdue(self, group: str) -> list[str]:
        """The ids that a reader of a group should pass to `end_overdue`.

        Members whose lease has expired, and all requests that have waited too long: these end at
        once, so the next call does not return them again.
        """
        return await self.run(grouping.overdue(self.keys, group))

    # The ends of the queue, with a cursor or as a group of sinks.

    async def told(self, *, after: str, block_seconds: float | None = None) -> list[End]:
        """The ends after a cursor, in order; waits for one as `read_ends` does.

        Leaves out the ends of batches, and entries that cannot be read.
        """
        block = at_most(block_seconds, self._longest_block)
        return await self.run(telling.told(self.keys, after=after, block_seconds=block))

    async def begin(self, group: str, *, from_oldest: bool = False) -> bool:
        """A group that never was begins with the next end, or with the oldest one that is kept.

        Returns whether this group is new. One that is there, or that a server has lost, stays where
        it is; one without a mark, as earlier versions leave it, gets that of its position.
        """
        return await self.run(telling.begin(self.keys, group, from_oldest=from_oldest))

    async def deliver(
        self, group: str, consumer: str, *, block_seconds: float | None = None
    ) -> Delivery:
        """Ends that were delivered to no consumer of the group yet; waits as `told` does.

        Creates the group if it is not there: before the oldest end that is kept, or where it was
        before a server lost it. BrokerUnavailable if Redis has no memory left for that; a group
        that is there is read also without.
        """
        block = at_most(block_seconds, self._longest_block)
        return await self.run(telling.deliver(self.keys, group, consumer, block_seconds=block))

    async def delivered(self, group: str, consumer: str) -> Delivery:
        """Ends that were delivered to this consumer and not acknowledged, the oldest ones."""
        return await self.run(telling.delivered(self.keys, group, consumer))

    async def take_over(self, group: str, consumer: str, *, idle_seconds: float) -> Delivery:
        """Delivers ends that other consumers have not acknowledged for so many seconds."""
        taking = telling.take_over(self.keys, group, consumer, idle_seconds=idle_seconds)
        return await self.run(taking)

    async def acknowledge(self, group: str, positions: Sequence[str]) -> None:
        """Marks ends as handled: they are not delivered again. May be repeated."""
        await self.run(telling.acknowledge(self.keys, group, positions))
