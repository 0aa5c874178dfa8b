"""A group of requests as its caller sees it: how far it is, and its results as they come.

    group = quire.submit_many(rows, group="eval-7")
    for completion in group.results():
        print(completion.request_id, completion.state, completion.text)

The group is its name: any process that knows it can look at it with `Client.attach_group`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from quire.broker.broker import Broker
from quire.broker.grouping import EndsPlace, GroupEnd
from quire.client.handle import bearing, completion_of, explain
from quire.errors import ProtocolError, QuireError, ResultExpired
from quire.transport.connection import MAX_BLOCK_SECONDS
from quire.transport.patience import Patience
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
        total = Counter[State]()
        for broker in self._brokers:
            total.update(broker.group_counts(self.group))
        return dict(total)

    def results(self, *, timeout: float | None = None) -> Iterator[Completion]:
        """Yields the completion of every member as it ends, with its text, and ends with the last.

        Those that failed, expired or were cancelled are among them; nothing is raised for them. A
        member whose result is gone already is told as an error `result_expired`, and one whose
        result cannot be read as failed, `damaged`. Each is told once, even if it is requeued
        after that. WaitTimeout when `timeout` seconds pass. Begins with those that have ended
        before.
        """
        patience, told = self._patience(timeout), set[str]()
        for broker, end in self._ends(patience):
            if end.request_id in told:
                continue
            completion: Completion | None
            try:
                look = partial(completion_of, broker, end.request_id)
                completion = bearing(patience, look)
            except ResultExpired:
                completion = forgotten(end)
            except ProtocolError as error:
                completion = unreadable(end, error)
            # One that was requeued is open again; its later end is still to come.
            if completion is not None:
                told.add(end.request_id)
                yield completion

    def wait(self, *, timeout: float | None = None) -> dict[State, int]:
        """Waits until all members have ended; returns their counts. WaitTimeout."""
        patience = self._patience(timeout)
        for _ in self._ends(patience):
            pass
        return bearing(patience, self.counts)

    def cancel(self) -> int:
        """Asks for the end of every open member; returns how many were open."""
        num_open = 0
        for broker in self._brokers:
            num_open += len(broker.cancel_many(broker.open_members(self.group)))
        return num_open

    def _patience(self, timeout: float | None) -> Patience:
        outage_seconds = self._brokers[0].outage_seconds
        return Patience(timeout, f"the group {self.group}", outage_seconds=outage_seconds)

    def _ends(self, patience: Patience) -> Iterator[tuple[Broker, GroupEnd]]:
        """The ends of members as they come, until none is open."""
        places = {broker: EndsPlace() for broker in self._brokers}
        while True:
            # Looked at before the ends: whatever ended before the look is found by the reads.
            waiting = [
                broker
                for broker in places
                if bearing(patience, partial(broker.num_open_members, self.group))
            ]
            has_news = False
            for broker, place in places.items():
                read = partial(broker.read_ends, self.group, after=place.overlap)
                ends = place.take(bearing(patience, read))
                has_news = has_news or ends is None or bool(ends)
                for end in ends or ():
                    yield broker, end
            if has_news:
                patience.has_news()
                continue
            if not waiting:
                return
            if not self._has_come(waiting, places, patience):
                for broker in waiting:
                    # What is wrong then is met by the next read; see `end_overdue` of handles.
                    with contextlib.suppress(QuireError):
                        broker.end_overdue(broker.overdue(self.group))
                explain(patience, waiting[0])

    def _has_come(
        self, waiting: Sequence[Broker], places: Mapping[Broker, EndsPlace], patience: Patience
    ) -> bool:
        """Waits for an end at each shard in turn; returns whether one has come."""
        turn = MAX_BLOCK_SECONDS if len(places) == 1 else TURN_SECONDS
        for broker in waiting:

            def wait(broker: Broker = broker) -> list[GroupEnd]:
                after, left = places[broker].position, patience.left(turn)
                return broker.read_ends(self.group, after=after, block_seconds=left)

            if bearing(patience, wait):
                return True
        return False


def forgotten(end: GroupEnd) -> Completion:
    """What is left to say about a member whose result is gone already."""
    error = ErrorInfo("result_expired", "the result was kept no longer")
    return Completion(end.request_id, end.state, FinishReason.ERROR, error=error)


def unreadable(end: GroupEnd, reason: ProtocolError) -> Completion:
    """What is told of a member whose result is damaged: no text of it can be trusted."""
    error = ErrorInfo("damaged", str(reason))
    return Completion(end.request_id, State.FAILED, FinishReason.ERROR, error=error)
