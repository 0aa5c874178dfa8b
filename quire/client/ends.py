"""Follows the ends of a queue over all its shards, with a cursor or as a consumer of a group.

Both readings are procedures (see quire/transport/procedure.py) that a client runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from quire.broker.grouping import FIRST_POSITION
from quire.broker.telling import Delivery
from quire.client.handle import retried
from quire.client.steps import AnyBroker, Call
from quire.errors import InvalidRequest
from quire.transport.connection import MAX_BLOCK_SECONDS
from quire.transport.patience import Patience
from quire.transport.procedure import Give, Procedure
from quire.wire.ends import End

#: If the queue has several shards, how long a reader waits for one before it reads the next.
TURN_SECONDS = 0.05

#: After so many seconds without an acknowledgement another consumer takes an end over.
TAKE_OVER_SECONDS = 60.0

#: How often a consumer looks for such ends.
LOOK_SECONDS = 10.0

#: The largest sequence number of a stream id within its millisecond.
_LAST_NUMBER = 2**64 - 1

_POSITION = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")


def reading_of(
    brokers: Sequence[AnyBroker],
    *,
    after: str,
    group: str | None,
    consumer: str | None,
    timeout: float | None,
) -> EndsReading | SinkReading:
    """The reading that `Client.ends` means. InvalidRequest."""
    if (group is None) != (consumer is None) or (group is not None and after):
        raise InvalidRequest("group", "give group and consumer, or a cursor, or nothing")
    if group is None or consumer is None:
        return EndsReading(brokers, after=after, timeout=timeout)
    for field, name in (("group", group), ("consumer", consumer)):
        if not _NAME.fullmatch(name):
            raise InvalidRequest(field, f"must match {_NAME.pattern}")
    return SinkReading(brokers, group, consumer, timeout=timeout)


class EndsReading:
    """One reader with a cursor: the positions of all shards, separated by commas.

    Positions are times of Redis. A Redis that lost its last ends, and whose clock is behind, writes
    the next ends before the cursor of a reader that has seen the lost ones. So each read begins at
    the last end that was seen. If it is not there, the reader starts from the beginning.
    """

    def __init__(self, brokers: Sequence[AnyBroker], *, after: str, timeout: float | None) -> None:
        self._brokers = brokers
        self._positions = positions_in(after, num_shards=len(brokers))
        self._timeout = timeout
        self._patience = patience_of(brokers)

    def ends(self) -> Procedure[End | None]:
        """Gives each end; returns None after `timeout` seconds without one."""
        turn_seconds = MAX_BLOCK_SECONDS if len(self._brokers) == 1 else TURN_SECONDS
        give_up = Deadline(self._timeout)
        while True:
            has_news = False
            for shard in range(len(self._brokers)):
                for end in (yield from self._new_in(shard)):
                    has_news = True
                    self._positions[shard] = end.position
                    yield Give(replace(end, position=",".join(self._positions)))
            if has_news:
                give_up = Deadline(self._timeout)
                continue
            for shard, broker in enumerate(self._brokers):
                seconds = give_up.left(turn_seconds)
                if seconds is None:
                    return None
                wait = partial(broker.told, after=self._positions[shard], block_seconds=seconds)
                if (yield from retried(self._patience, wait)):
                    break

    def acknowledge(self) -> Procedure[None]:
        """Does nothing: the caller has the cursor."""
        yield from ()

    def _new_in(self, shard: int) -> Procedure[Sequence[End]]:
        position, broker = self._positions[shard], self._brokers[shard]
        read = partial(broker.told, after=before(position))
        ends: Sequence[End] = yield from retried(self._patience, read)
        if position == FIRST_POSITION:
            return ends
        if ends and ends[0].position == position:
            return ends[1:]
        self._positions[shard] = FIRST_POSITION
        ends = yield from retried(self._patience, partial(broker.told, after=FIRST_POSITION))
        return ends


class SinkReading:
    """One consumer of a group. An end counts as handled when the next one is asked for."""

    def __init__(
        self, brokers: Sequence[AnyBroker], group: str, consumer: str, *, timeout: float | None
    ) -> None:
        self._brokers = brokers
        self._group = group
        self._consumer = consumer
        self._timeout = timeout
        self._patience = patience_of(brokers)
        #: Handled and not acknowledged yet: the shard's broker, and positions.
        self._handled: dict[AnyBroker, list[str]] = {broker: [] for broker in brokers}

    def ends(self) -> Procedure[End | None]:
        """Gives each end; returns None after `timeout` seconds without one.

        Begins with those that this consumer had not acknowledged when it ended.
        """
        names = self._group, self._consumer
        for broker in self._brokers:
            while True:
                again = partial(broker.delivered, *names)
                if not (yield from self._give(broker, again)):
                    break
        turn_seconds = MAX_BLOCK_SECONDS if len(self._brokers) == 1 else TURN_SECONDS
        give_up, look = Deadline(self._timeout), Deadline(0.0)
        while True:
            has_news, seconds = False, give_up.left(min(turn_seconds, LOOK_SECONDS))
            if look.left(LOOK_SECONDS) is None:
                for broker in self._brokers:
                    left = partial(broker.take_over, *names, idle_seconds=TAKE_OVER_SECONDS)
                    has_news |= yield from self._give(broker, left)
                look = Deadline(LOOK_SECONDS)
            for broker in self._brokers:
                # Once the time is over, a last read that does not wait.
                new = partial(broker.deliver, *names, block_seconds=seconds)
                has_news |= yield from self._give(broker, new)
            if has_news:
                give_up = Deadline(self._timeout)
            elif seconds is None:
                return None

    def acknowledge(self) -> Procedure[None]:
        """Acknowledges what was handled."""
        for broker, positions in self._handled.items():
            if positions:
                acknowledge = partial(broker.acknowledge, self._group, positions.copy())
                yield Call(acknowledge)
                positions.clear()

    def _give(self, broker: AnyBroker, read: Any) -> Procedure[bool]:
        """Gives what a read delivers, and acknowledges it; returns whether there was any."""
        delivery: Delivery = yield from retried(self._patience, read)
        handled = self._handled[broker]
        unreadable = {*delivery.positions} - {end.position for end in delivery.ends}
        handled += sorted(unreadable)
        for end in delivery.ends:
            yield Give(end)
            handled.append(end.position)
        yield from retried(self._patience, self.acknowledge)
        return bool(delivery.positions)


class Deadline:
    """Is over after so many seconds; never with None."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self, longest_seconds: float) -> float | None:
        """For how many seconds a read may wait; None once the time is over."""
        if self._end is None:
            return longest_seconds
        left = self._end - time.monotonic()
        return min(left, longest_seconds) if left > 0 else None


def patience_of(brokers: Sequence[AnyBroker]) -> Patience:
    """A reader of ends outlasts an outage of Redis, but has nothing to explain."""
    seconds = brokers[0].outage_seconds
    return Patience(None, "the ends", outage_seconds=seconds, explains=False)


def positions_in(after: str, *, num_shards: int) -> list[str]:
    """The positions of all shards in a cursor; an empty cursor is before the oldest end kept."""
    if not after:
        return [FIRST_POSITION] * num_shards
    positions = after.split(",")
    if len(positions) != num_shards or not all(map(_POSITION.fullmatch, positions)):
        raise InvalidRequest("after", f"must be the position of an end in {num_shards} shards")
    return positions


def before(position: str) -> str:
    """The cursor of a read that begins with the end at this position."""
    if position == FIRST_POSITION:
        return position
    time_ms, number = map(int, position.split("-"))
    return f"{time_ms}-{number - 1}" if number else f"{time_ms - 1}-{_LAST_NUMBER}"
