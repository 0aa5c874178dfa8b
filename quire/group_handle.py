"""A group of requests as its caller sees it: how far it is, and its results as they come.

    group = quire.submit_many(rows, group="eval-7")
    for completion in group.results():
        print(completion.request_id, completion.state, completion.text)

The group is its name: any process that knows it can look at it with `Client.attach_group`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

from quire.broker import Broker
from quire.connection import MAX_BLOCK_SECONDS
from quire.errors import ProtocolError, QuireError, ResultExpired
from quire.grouping import EndsPlace, GroupEnd
from quire.handle import completion_of
from quire.output import Completion, ErrorInfo, FinishReason, State
from quire.patience import Patience

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
        told = set[str]()
        for broker, end in self._ends(timeout=timeout):
            if end.request_id in told:
                continue
            completion: Completion | None
            try:
                completion = completion_of(broker, end.request_id)
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
        for _ in self._ends(timeout=timeout):
            pass
        return self.counts()

    def cancel(self) -> int:
        """Asks for the end of every open member; returns how many were open."""
        num_open = 0
        for broker in self._brokers:
            num_open += len(broker.cancel_many(broker.open_members(self.group)))
        return num_open

    def _ends(self, *, timeout: float | None) -> Iterator[tuple[Broker, GroupEnd]]:
        """The ends of members as they come, until none is open."""
        patience = Patience(timeout, f"the group {self.group}")
        places = {broker: EndsPlace() for broker in self._brokers}
        turn = MAX_BLOCK_SECONDS if len(places) == 1 else TURN_SECONDS
        while True:
            # Looked at before the ends: whatever ended before the look is found by the reads.
            waiting = {broker for broker in places if broker.num_open_members(self.group)}
            has_news = False
            for broker, place in places.items():
                ends = place.take(broker.read_ends(self.group, after=place.overlap))
                has_news = has_news or ends is None or bool(ends)
                for end in ends or ():
                    yield broker, end
            if has_news:
                continue
            if not waiting:
                return
            for broker in waiting:
                left = patience.left(turn)
                after = places[broker].position
                if broker.read_ends(self.group, after=after, block_seconds=left):
                    break
            else:
                for broker in waiting:
                    # What is wrong then is met by the next read; see `end_overdue` of handles.
                    with contextlib.suppress(QuireError):
                        broker.end_overdue(broker.overdue(self.group))


def forgotten(end: GroupEnd) -> Completion:
    """What is left to say about a member whose result is gone already."""
    error = ErrorInfo("result_expired", "the result was kept no longer")
    return Completion(end.request_id, end.state, FinishReason.ERROR, error=error)


def unreadable(end: GroupEnd, reason: ProtocolError) -> Completion:
    """What is told of a member whose result is damaged: no text of it can be trusted."""
    error = ErrorInfo("damaged", str(reason))
    return Completion(end.request_id, State.FAILED, FinishReason.ERROR, error=error)
