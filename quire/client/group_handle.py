"""A group of requests as its caller sees it: how far it is, and its results as they come.

    group = quire.submit_many(rows, group="eval-7")
    for completion in group.results():
        print(completion.request_id, completion.state, completion.text)

The group is its name: any process that knows it can look at it with `Client.attach_group`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from quire.broker.broker import Broker
from quire.broker.grouping import EndsCursor, GroupEnd
from quire.client.handle import borne, completion_of, explaining
from quire.client.steps import AnyBroker, Call, in_thread
from quire.errors import ProtocolError, QuireError, ResultExpired
from quire.transport.connection import MAX_BLOCK_SECONDS
from quire.transport.patience import Patience
from quire.transport.procedure import Give, Procedure, run
from quire.wire.output import Completion, ErrorInfo, FinishReason, State

#: With its members in several shards, for how long a reader waits at one before it looks at the
#: next.
TURN_SECONDS = 0.05


class GroupHandle:
    """One group. It holds no state but the name and may be thrown away.

    Its counts are kept inside the transitions of its members, so at every moment they add up to the
    number of its requests. It is forgotten when the last of its members is; a group that nobody
    knows has no members, and waiting for it ends at once.
    """

    def __init__(self, brokers: Sequence[Broker], group: str) -> None:
        self.group = group
        self._brokers = brokers

    def __repr__(self) -> str:
        return f"GroupHandle({self.group!r})"

    def counts(self) -> dict[State, int]:
        """How many of its requests are in each state; states without any are left out."""
        return run(counts_of(self._brokers, self.group), in_thread)

    def results(self, *, timeout: float | None = None) -> Iterator[Completion]:
        """Yields the completion of every member as it ends, with its text, and ends with the last.

        Those that failed, expired or were cancelled are among them; nothing is raised for them. A
        member whose result is gone already is told as an error `result_expired`, and one whose
        result cannot be read as failed, `damaged`. Each is told once, even if it is requeued
        after that. WaitTimeout when `timeout` seconds pass. Begins with those that have ended
        before.
        """
        results = GroupReading(self._brokers, self.group, timeout=timeout).results()
        while (completion := run(results, in_thread)) is not None:
            yield completion

    def wait(self, *, timeout: float | None = None) -> dict[State, int]:
        """Waits until all members have ended; returns their counts. WaitTimeout."""
        reading = GroupReading(self._brokers, self.group, timeout=timeout)
        return run(reading.wait(), in_thread)

    def cancel(self) -> int:
        """Asks for the end of every open member; returns how many were open."""
        return run(cancelling(self._brokers, self.group), in_thread)


# For both kinds of handle.


def counts_of(brokers: Sequence[AnyBroker], group: str) -> Procedure[dict[State, int]]:
    """See `GroupHandle.counts`."""
    total = Counter[State]()
    for broker in brokers:
        total.update((yield Call(partial(broker.group_counts, group))))
    return dict(total)


def cancelling(brokers: Sequence[AnyBroker], group: str) -> Procedure[int]:
    """See `GroupHandle.cancel`."""
    num_open = 0
    for broker in brokers:
        members = yield Call(partial(broker.open_members, group))
        num_open += len((yield Call(partial(broker.cancel_many, members))))
    return num_open


class GroupReading:
    """One reader of a group; its methods are procedures. Its time begins when it is made."""

    def __init__(self, brokers: Sequence[AnyBroker], group: str, *, timeout: float | None) -> None:
        self._brokers = brokers
        self._group = group
        self._cursors = {broker: EndsCursor() for broker in brokers}
        outage_seconds = brokers[0].outage_seconds
        self._patience = Patience(timeout, f"the group {group}", outage_seconds=outage_seconds)

    def results(self) -> Procedure[Completion | None]:
        """Gives each completion, and returns None after the last; see `GroupHandle.results`."""
        told = set[str]()

        def tell(broker: AnyBroker, end: GroupEnd) -> Procedure[None]:
            if end.request_id in told:
                return
            completion: Completion | None
            try:
                look = partial(completion_of, broker, end.request_id)
                completion = yield from borne(self._patience, look)
            except ResultExpired:
                completion = forgotten(end)
            except ProtocolError as error:
                completion = unreadable(end, error)
            # One that was requeued is open again; its later end is still to come.
            if completion is not None:
                told.add(end.request_id)
                yield Give(completion)

        yield from self._all_ends(tell)
        return None

    def wait(self) -> Procedure[dict[State, int]]:
        """See `GroupHandle.wait`."""
        yield from self._all_ends(_tell_nothing)
        look = partial(counts_of, self._brokers, self._group)
        counts: dict[State, int] = yield from borne(self._patience, look)
        return counts

    def _all_ends(self, tell: Callable[[AnyBroker, GroupEnd], Procedure[None]]) -> Procedure[None]:
        """Tells the ends of members as they come, until none is open."""
        patience = self._patience
        while True:
            # Looked at before the ends: whatever ended before the look is found by the reads.
            waiting: list[AnyBroker] = []
            for broker in self._brokers:
                num_open = partial(broker.num_open_members, self._group)
                if (yield from borne(patience, num_open)):
                    waiting.append(broker)
            has_news = False
            for broker, cursor in self._cursors.items():
                read = partial(broker.read_ends, self._group, after=cursor.overlap)
                ends = cursor.take((yield from borne(patience, read)))
                has_news = has_news or ends is None or bool(ends)
                for end in ends or ():
                    yield from tell(broker, end)
            if has_news:
                patience.has_news()
            elif not waiting:
                return
            elif not (yield from self._has_come(waiting)):
                yield from self._end_overdue(waiting)
                yield from explaining(patience, waiting[0])

    def _has_come(self, waiting: Sequence[AnyBroker]) -> Procedure[bool]:
        """Waits for an end at each shard in turn; returns whether one has come."""
        longest = MAX_BLOCK_SECONDS if len(self._cursors) == 1 else TURN_SECONDS
        for broker in waiting:

            def wait(broker: AnyBroker = broker) -> Any:
                after, left = self._cursors[broker].position, self._patience.left(longest)
                return broker.read_ends(self._group, after=after, block_seconds=left)

            if (yield from borne(self._patience, wait)):
                return True
        return False

    def _end_overdue(self, waiting: Sequence[AnyBroker]) -> Procedure[None]:
        for broker in waiting:
            # What is wrong then is met by the next read; see `end_overdue` of handles.
            with contextlib.suppress(QuireError):
                overdue = yield Call(partial(broker.overdue, self._group))
                yield Call(partial(broker.end_overdue, overdue))


def _tell_nothing(_broker: AnyBroker, _end: GroupEnd) -> Procedure[None]:
    yield from ()


def forgotten(end: GroupEnd) -> Completion:
    """What is left to say about a member whose result is gone already."""
    error = ErrorInfo("result_expired", "the result was kept no longer")
    return Completion(end.request_id, end.state, FinishReason.ERROR, error=error)


def unreadable(end: GroupEnd, reason: ProtocolError) -> Completion:
    """What is told of a member whose result is damaged: no text of it can be trusted."""
    error = ErrorInfo("damaged", str(reason))
    return Completion(end.request_id, State.FAILED, FinishReason.ERROR, error=error)
