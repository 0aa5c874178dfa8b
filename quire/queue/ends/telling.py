"""The broker's reads of the ends of a queue, with a cursor of the reader's own or as a group.

A group of sinks shares the ends: each is delivered to one of its consumers, which acknowledges it.
Redis stores what is delivered and not acknowledged, so another consumer can take it over.

The group is part of the stream. Its mark is not: up to which position its consumers have handled
all ends. A group that is lost continues from its mark.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from quire.errors import BrokerUnavailable, ProtocolError
from quire.keys import Keys
from quire.queue.streams import FIRST_CURSOR, before, entries_by_stream, read_streams
from quire.transport.connection import translated
from quire.transport.procedure import Procedure, RoundTrip, command
from quire.wire.ends import BatchEnd, End
from quire.wire.output import split_entry_id

#: The most ends taken by one read.
MAX_TOLD_PER_READ = 256

_log = logging.getLogger("quire")


@dataclass(frozen=True, slots=True)
class Delivery:
    """Ends that were delivered to one consumer. `positions` are all that it must acknowledge.

    They include entries that cannot be read, or that were trimmed before they were read. `batches`
    are the ends of batches among them, which readers of requests pass over.
    """

    ends: Sequence[End]
    positions: Sequence[str]
    batches: Sequence[BatchEnd] = ()


def told(keys: Keys, *, after: str, block_seconds: float | None) -> Procedure[list[End]]:
    """See `Producer.told`."""
    while True:
        (reply,) = yield read_streams(
            {keys.ends: after}, count=MAX_TOLD_PER_READ, block_seconds=block_seconds
        )
        found = _delivery(_entries(reply))
        if found.ends or not found.positions:
            return list(found.ends)
        # Only what is passed over, which must not end the wait: a reader's cursor is at an end of a
        # request, so the next read would find the same again.
        after = found.positions[-1]


def begin(keys: Keys, group: str, *, from_oldest: bool) -> Procedure[bool]:
    """See `Producer.begin`.

    Only the mark is written here: the next read creates the group from it. So no death of a process
    leaves a group without its beginning.
    """
    look = (
        command("xpending", keys.ends, group),
        command("hexists", keys.ends_read, group),
        command("xrevrange", keys.ends, count=1),
        command("xinfo_groups", keys.ends),
    )
    state, has_mark, newest, groups = yield RoundTrip(look, keeps_errors=True)
    for reply in (has_mark, newest):
        if isinstance(reply, RedisError):
            raise translated(reply)
    if has_mark:
        return False
    is_new = _is_absent(state)
    mark = _position_of(group, state, groups)
    if is_new:
        mark = newest[0][0] if newest and not from_oldest else FIRST_CURSOR
    if mark is None:
        return False
    # Another consumer may begin at the same moment: the first one decides.
    (is_written,) = yield RoundTrip((command("hsetnx", keys.ends_read, group, mark),))
    return is_new and bool(is_written)


def deliver(
    keys: Keys, group: str, consumer: str, *, block_seconds: float | None
) -> Procedure[Delivery]:
    """See `Producer.deliver`."""
    block_ms = None if block_seconds is None else max(1, int(block_seconds * 1000))
    entries = yield from _as_consumer(keys, group, consumer, after=">", block_ms=block_ms)
    return _delivery(entries)


def delivered(keys: Keys, group: str, consumer: str) -> Procedure[Delivery]:
    """See `Producer.delivered`."""
    entries = yield from _as_consumer(keys, group, consumer, after="0", block_ms=None)
    return _delivery(entries)


def take_over(keys: Keys, group: str, consumer: str, *, idle_seconds: float) -> Procedure[Delivery]:
    """See `Producer.take_over`."""
    claim = command(
        "xautoclaim",
        keys.ends,
        group,
        consumer,
        min_idle_time=int(idle_seconds * 1000),
        count=MAX_TOLD_PER_READ,
    )
    reply = yield from _in_group(keys, group, claim, wait_seconds=0.0)
    # The second part are the entries. Redis 6.2 has nothing in the place of one that was trimmed.
    return _delivery([(name, fields) for name, fields in reply[1] if name is not None])


def acknowledge(keys: Keys, group: str, positions: Sequence[str]) -> Procedure[None]:
    """See `Producer.acknowledge`."""
    if not positions:
        return
    done, left = yield RoundTrip(
        (command("xack", keys.ends, group, *positions), command("xpending", keys.ends, group)),
        keeps_errors=True,
    )
    if _is_absent(left):
        # The mark is older, so these ends come again.
        return
    for reply in (done, left):
        if isinstance(reply, RedisError):
            raise translated(reply)
    # Whatever another consumer acknowledges meanwhile, everything up to here is handled.
    oldest = left["min"]
    handled = before(oldest.decode()) if oldest else max(positions, key=_number_of)
    mark = command("hset", keys.ends_read, group, handled)
    (written,) = yield RoundTrip((mark,), keeps_errors=True)
    if isinstance(written, RedisError) and not isinstance(written, OutOfMemoryError):
        raise translated(written)


def _as_consumer(
    keys: Keys, group: str, consumer: str, *, after: str, block_ms: int | None
) -> Procedure[Any]:
    read = command(
        "xreadgroup",
        group,
        consumer,
        {keys.ends: after},
        count=MAX_TOLD_PER_READ,
        block=block_ms,
    )
    reply = yield from _in_group(keys, group, read, wait_seconds=(block_ms or 0) / 1000)
    return _entries(reply)


def _in_group(keys: Keys, group: str, read: Any, *, wait_seconds: float) -> Procedure[Any]:
    """The reply to a command of the group. Creates the group at its mark if it is not there.

    Without a mark it begins with the oldest end that is kept.
    """
    trip = RoundTrip((read,), keeps_errors=True, wait_seconds=wait_seconds)
    (reply,) = yield trip
    if _is_absent(reply):
        look = (command("hget", keys.ends_read, group), command("xrevrange", keys.ends, count=1))
        mark, newest = yield RoundTrip(look)
        begin = _beginning(mark, newest)
        # Only now: unlike the reads, it is refused by a server without memory.
        create = command("xgroup_create", keys.ends, group, id=begin, mkstream=True)
        (made,) = yield RoundTrip((create,), keeps_errors=True)
        if isinstance(made, OutOfMemoryError):
            raise BrokerUnavailable(f"Redis has no memory left for the group {group}") from made
        if isinstance(made, RedisError) and not str(made).startswith("BUSYGROUP"):
            raise translated(made)
        (reply,) = yield trip
    if isinstance(reply, RedisError):
        raise translated(reply)
    return reply


def _position_of(group: str, state: Any, groups: Any) -> str | None:
    """Up to where a group that has no mark has handled all ends; None if that cannot be told.

    The states were read one after the other, and each position is safe by itself: what is handled
    stays so. A user with the rights of an earlier version may not read the second one.
    """
    if isinstance(state, RedisError):
        return None
    if oldest := state["min"]:
        return before(oldest.decode())
    known = () if isinstance(groups, RedisError) else groups
    found = next((one for one in known if one["name"] == group.encode()), None)
    if found is None or found["pending"]:
        return None
    return str(found["last-delivered-id"].decode())


def _beginning(mark: Any, newest: Any) -> str:
    """Where a group begins: at its mark, or with the oldest end if there is no sound mark.

    All ends before the mark: the stream has begun anew, by a clock that is behind the old one's.
    """
    try:
        if mark and newest and split_entry_id(newest[0][0]) >= split_entry_id(mark):
            return str(mark.decode())
    except ProtocolError:
        _log.warning("the mark %r of a group of ends cannot be read", mark)
    return FIRST_CURSOR


def _is_absent(reply: Any) -> bool:
    """Whether this reply to a command of a group says that the group is not there."""
    return isinstance(reply, ResponseError) and str(reply).startswith("NOGROUP")


def _number_of(position: str) -> tuple[int, int]:
    return split_entry_id(position.encode())


def _entries(reply: Any) -> list[Any]:
    return [entry for _, entries in entries_by_stream(reply) for entry in entries]


def _delivery(entries: Iterable[Any]) -> Delivery:
    ends, batches, positions = list[End](), list[BatchEnd](), list[str]()
    for entry_id, fields in entries:
        positions.append(entry_id.decode())
        # A trimmed entry has no fields.
        if fields:
            try:
                if BatchEnd.is_in(fields):
                    batches.append(BatchEnd.from_entry(entry_id, fields))
                else:
                    ends.append(End.from_entry(entry_id, fields))
            except ProtocolError as error:
                _log.warning("left out: %s", error)
    return Delivery(ends, positions, batches)
