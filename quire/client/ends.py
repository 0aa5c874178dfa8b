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

from quire.client.handle import retried
from quire.client.shard_cursor import cursors_in
from quire.client.steps import AnyBroker, BrokerCall
from quire.errors import InvalidRequest
from quire.queue.ends.telling import Delivery
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
    """One reader with a cursor: those of all shards, separated by commas."""

    def __init__(self, brokers: Sequence[AnyBroker], *, after: str, timeout: float | None) -> None:
        self._brokers = brokers
        self._cursors = cursors_in(after, num_shards=len(brokers))
        self._timeout = timeout
        self._patience = patience_of(brokers)

    def ends(self) -> Procedure[End | None]:
        """Gives each end; returns None after `timeout` seconds without one."""
        turn_seconds = MAX_BLOCK_SECONDS if len(self._brokers) == 1 else TURN_SECONDS
        give_up = Deadline(self._timeout)
        while True:
            has_news = False
            for shard, cursor in enumerate(self._cursors):
                for end in (yield from cursor.new_ends(partial(self._read, shard))):
                    has_news = True
                    cursor.add(end)
                    yield Give(replace(end, position=",".join(map(str, self._cursors))))
            if has_news:
                give_up = Deadline(self._timeout)
                continue
            for shard, cursor in enumerate(self._cursors):
                seconds = give_up.left(turn_seconds)
                if seconds is None:
                    return None
                if (yield from self._read(shard, cursor.newest, block_seconds=seconds)):
                    break

    def acknowledge(self) -> Procedure[None]:
        """Does nothing: the caller has the cursor."""
        yield from ()

    def _read(
        self, shard: int, after: str, *, block_seconds: float | None = None
    ) -> Procedure[Sequence[End]]:
        read = partial(self._brokers[shard].told, after=after, block_seconds=block_seconds)
        ends: Sequence[End] = yield from retried(self._patience, read)
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
                yield BrokerCall(acknowledge)
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
