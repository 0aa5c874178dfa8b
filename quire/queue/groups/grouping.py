"""The broker's reads and transitions for groups: requests that were submitted together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.keys import GROUP_SEPARATOR, Keys
from quire.queue.clock import now_ms
from quire.queue.request.arguments import MAX_ITEMS_PER_CALL
from quire.queue.streams import FIRST_CURSOR, before, entries_by_stream, read_streams
from quire.transport.procedure import Procedure, RoundTrip, command
from quire.wire.codec import reading
from quire.wire.output import State

#: The most ends taken by one read.
MAX_ENDS_PER_READ = 256

#: The most expired leases that one look reads: a millisecond of the server.
MAX_LEASES = 4096


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """One member of a group has ended. `position` is the cursor to read on from.

    `tenant` is empty if a program of an earlier version has written the end.
    """

    position: str
    request_id: str
    state: State
    tenant: str


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """The part of a group in one shard: its requests by state, and their ends so far.

    A request that was queued again after its end may have several ends.
    """

    counts: Mapping[State, int]
    num_ends: int
    last_end: GroupEnd | None


class EndsCursor:
    """The cursor of one reader of a group's ends in one shard.

    Positions are times of Redis. A Redis that lost its last ends, and whose clock is behind, as a
    replica's may be, writes the next ends before the cursor of a reader that has seen the lost
    ones. So each read begins at the last end that was seen. If another one is there, the reader
    starts from the beginning.
    """

    def __init__(self) -> None:
        self._last: GroupEnd | None = None

    @property
    def position(self) -> str:
        """The cursor to wait from for the next end."""
        return self._last.position if self._last else FIRST_CURSOR

    @property
    def overlap(self) -> str:
        """The cursor to read on from, so that the last end that was seen is read again."""
        return before(self.position)

    def take(self, ends: Sequence[GroupEnd]) -> Sequence[GroupEnd] | None:
        """The new ends among those read from `overlap` on; None if the reader must start again."""
        if self._last is not None:
            if not ends or ends[0] != self._last:
                self._last = None
                return None
            ends = ends[1:]
        if ends:
            self._last = ends[-1]
        return ends


def group_counts(keys: Keys, group: str) -> Procedure[dict[State, int]]:
    """See `Producer.group_counts`."""
    counts, _, _ = keys.of_group(group)
    (fields,) = yield RoundTrip((command("hgetall", counts),))
    return counts_of(fields)


def group_progress(keys: Keys, group: str) -> Procedure[GroupProgress]:
    """See `Producer.group_progress`."""
    counts, _, ends = keys.of_group(group)
    reads = command("hgetall", counts), command("xlen", ends), command("xrevrange", ends, count=1)
    fields, num_ends, newest = yield RoundTrip(reads)
    last_end = next(iter(ends_in(newest)), None)
    return GroupProgress(counts_of(fields), num_ends, last_end)


def open_members(keys: Keys, group: str) -> Procedure[list[str]]:
    """See `Producer.open_members`."""
    _, members, _ = keys.of_group(group)
    (names,) = yield RoundTrip((command("smembers", members),))
    return sorted(name.decode() for name in names)


def num_open_members(keys: Keys, group: str) -> Procedure[int]:
    """See `Producer.num_open_members`."""
    _, members, _ = keys.of_group(group)
    (number,) = yield RoundTrip((command("scard", members),))
    return int(number)


def read_ends(
    keys: Keys, group: str, *, after: str, block_seconds: float | None
) -> Procedure[list[GroupEnd]]:
    """See `Producer.read_ends`."""
    _, _, ends = keys.of_group(group)
    (reply,) = yield read_streams(
        {ends: after}, count=MAX_ENDS_PER_READ, block_seconds=block_seconds
    )
    return [end for _, entries in entries_by_stream(reply) for end in ends_in(entries)]


def overdue(keys: Keys, group: str) -> Procedure[list[str]]:
    """See `Producer.overdue`."""
    now = yield from now_ms()
    longest = ((keys.wait, MAX_ITEMS_PER_CALL), (keys.lease, MAX_LEASES))
    rows = yield RoundTrip(
        tuple(
            command("zrangebyscore", times, "-inf", now, start=0, num=most)
            for times, most in longest
        )
    )
    waiting, running = ([name.decode() for name in row if name.isascii()] for row in rows)
    own = f"{group}{GROUP_SEPARATOR}"
    return waiting + [name for name in running if name.startswith(own)]


def counts_of(fields: Mapping[bytes, bytes]) -> dict[State, int]:
    """Reads the counts of a group. ProtocolError."""
    with reading("a count of the group"):
        counts = {State(name.decode()): int(count) for name, count in fields.items()}
    return {state: count for state, count in counts.items() if count}


def ends_in(entries: Iterable[Any]) -> list[GroupEnd]:
    """Reads entries of the ends of one group. ProtocolError."""
    with reading("an end in the group"):
        return [
            GroupEnd(
                entry_id.decode(),
                fields[b"id"].decode(),
                State(fields[b"state"].decode()),
                fields.get(b"tenant", b"").decode(),
            )
            for entry_id, fields in entries
        ]
