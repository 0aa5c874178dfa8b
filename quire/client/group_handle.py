"""The handle of a group of requests: its progress, and its results in the order of their ends.

    group = quire.submit_many(rows, group="eval-7")
    for completion in group.results():
        print(completion.request_id, completion.state, completion.text)

Any process that knows the name of a group gets a handle from `Client.attach_group`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from quire.client.handle import completion_of, explaining, retried
from quire.client.steps import AnyBroker, BrokerCall, in_thread
from quire.errors import ProtocolError, QuireError, ResultExpired
from quire.queue.broker import Broker
from quire.queue.groups.grouping import EndsCursor, GroupEnd
from quire.transport.connection import MAX_BLOCK_SECONDS
from quire.transport.patience import Patience
from quire.transport.procedure import Give, Procedure, run
from quire.wire.output import Completion, ErrorInfo, FinishReason, State

#: If the queue has several shards, how long a reader waits for one before it reads the next.
TURN_SECONDS = 0.05


class GroupHandle:
    """One group. The handle has no state but the name, so it may be discarded.

    The transitions of the members update the counts, so they always add up to the number of
    requests. A group expires with its last member. A group that does not exist has no members, and
    a wait for it ends at once.
    """

    def __init__(self, brokers: Sequence[Broker], group: str) -> None:
        self.group = group
        self._brokers = brokers

    def __repr__(self) -> str:
        return f"GroupHandle({self.group!r})"

    def counts(self) -> dict[State, int]:
        """How many of its requests are in each state, without states that have none."""
        return run(counts_of(self._brokers, self.group), in_thread)

    def results(self, *, timeout: float | None = None) -> Iterator[Completion]:
        """Yields the completion of every member, with its text, when it ends.

        Begins with the members that have ended already, and returns after the last one. Members
        that failed, expired or were cancelled are included; nothing is raised for them. If the
        result has expired, the completion has the error `result_expired`; if it cannot be read, the
        state is failed and the error `damaged`. Each member is returned once, even if it is
        requeued later. WaitTimeout after `timeout` seconds.
        """
        results = GroupReading(self._brokers, self.group, timeout=timeout).results()
        while (completion := run(results, in_thread)) is not None:
            yield completion

    def wait(self, *, timeout: float | None = None) -> dict[State, int]:
        """Waits until all members have ended; returns their counts. WaitTimeout."""
        reading = GroupReading(self._brokers, self.group, timeout=timeout)
        return run(reading.wait(), in_thread)

    def cancel(self) -> int:
        """Cancels every open member; returns how many were open."""
        return run(cancelling(self._brokers, self.group), in_thread)


# For both kinds of handle.


def counts_of(brokers: Sequence[AnyBroker], group: str) -> Procedure[dict[State, int]]:
    """See `GroupHandle.counts`."""
    total = Counter[State]()
    for broker in brokers:
        total.update((yield BrokerCall(partial(broker.group_counts, group))))
    return dict(total)


def cancelling(brokers: Sequence[AnyBroker], group: str) -> Procedure[int]:
    """See `GroupHandle.cancel`."""
    num_open = 0
    for broker in brokers:
        members = yield BrokerCall(partial(broker.open_members, group))
        num_open += len((yield BrokerCall(partial(broker.cancel_many, members))))
    return num_open


class GroupReading:
    """One reader of a group; its methods are procedures. `timeout` starts when it is made."""

    def __init__(self, brokers: Sequence[AnyBroker], group: str, *, timeout: float | None) -> None:
        self._brokers = brokers
        self._group = group
        self._cursors = {broker: EndsCursor() for broker in brokers}
        outage_seconds = brokers[0].outage_seconds
        self._patience = Patience(timeout, f"the group {group}", outage_seconds=outage_seconds)

    def results(self) -> Procedure[Completion | None]:
        """Gives each completion, and returns None after the last. See `GroupHandle.results`."""
        given = set[str]()

        def give(broker: AnyBroker, end: GroupEnd) -> Procedure[None]:
            if end.request_id in given:
                return
            completion: Completion | None
            try:
                look = partial(completion_of, broker, end.request_id)
                completion = yield from retried(self._patience, look)
            except ResultExpired:
                completion = forgotten(end)
            except ProtocolError as error:
                completion = unreadable(end, error)
            # A requeued member is open again; its next end is read later.
            if completion is not None:
                given.add(end.request_id)
                yield Give(completion)

        yield from self._all_ends(give)
        return None

    def wait(self) -> Procedure[dict[State, int]]:
        """See `GroupHandle.wait`."""
        yield from self._all_ends(_give_nothing)
        look = partial(counts_of, self._brokers, self._group)
        counts: dict[State, int] = yield from retried(self._patience, look)
        return counts

    def _all_ends(self, give: Callable[[AnyBroker, GroupEnd], Procedure[None]]) -> Procedure[None]:
        """Calls `give` for the end of each member, until none is open."""
        patience = self._patience
        while True:
            # Counted before the ends are read, so that the reads find every end before the count.
            waiting: list[AnyBroker] = []
            for broker in self._brokers:
                num_open = partial(broker.num_open_members, self._group)
                if (yield from retried(patience, num_open)):
                    waiting.append(broker)
            has_news = False
            for broker, cursor in self._cursors.items():
                read = partial(broker.read_ends, self._group, after=cursor.overlap)
                ends = cursor.take((yield from retried(patience, read)))
                has_news = has_news or ends is None or bool(ends)
                for end in ends or ():
                    yield from give(broker, end)
            if has_news:
                patience.has_news()
            elif not waiting:
                return
            elif not (yield from self._has_come(waiting)):
                yield from self._end_overdue(waiting)
                yield from explaining(patience, waiting[0])

    def _has_come(self, waiting: Sequence[AnyBroker]) -> Procedure[bool]:
        """Waits for an end in each shard in turn; returns whether there was one."""
        longest = MAX_BLOCK_SECONDS if len(self._cursors) == 1 else TURN_SECONDS
        for broker in waiting:

            def wait(broker: AnyBroker = broker) -> Any:
                after, left = self._cursors[broker].position, self._patience.left(longest)
                return broker.read_ends(self._group, after=after, block_seconds=left)

            if (yield from retried(self._patience, wait)):
                return True
        return False

    def _end_overdue(self, waiting: Sequence[AnyBroker]) -> Procedure[None]:
        for broker in waiting:
            # A lasting error is raised by the next read.
            with contextlib.suppress(QuireError):
                overdue = yield BrokerCall(partial(broker.overdue, self._group))
                yield BrokerCall(partial(broker.end_overdue, overdue))


def _give_nothing(_broker: AnyBroker, _end: GroupEnd) -> Procedure[None]:
    yield from ()


def forgotten(end: GroupEnd) -> Completion:
    """The completion of a member whose result has expired."""
    error = ErrorInfo("result_expired", "the retention of the result has passed")
    return Completion(end.request_id, end.state, FinishReason.ERROR, error=error)


def unreadable(end: GroupEnd, reason: ProtocolError) -> Completion:
    """The completion of a member whose result is damaged; it has no text."""
    error = ErrorInfo("damaged", str(reason))
    return Completion(end.request_id, State.FAILED, FinishReason.ERROR, error=error)
