"""The newest entries of a stream that each shard has a part of, as one list in order of time.

Each shard is read to a limited depth, so the cost does not depend on the length of its stream.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from quire.keys import Keys
from quire.queue.clock import ms_of
from quire.queue.view.inspection import read_shards
from quire.transport.procedure import Procedure, RoundTrip, command
from service.console.reading.queue import QueueReading

#: The fewest entries that are read of a shard at once.
LEAST_OF_SHARD = 20

#: A place in the list: the id of an entry, and its shard.
_PLACE = re.compile(r"([0-9]{1,20})-([0-9]{1,20})(?::([0-9]{1,4}))?")

#: The largest part of the id of an entry.
_MAX_PART = (1 << 64) - 1


class EntryPlace(NamedTuple):
    """Where an entry stands: ordered by its time, then by its shard."""

    first: int
    second: int
    shard: int

    @property
    def cursor(self) -> str:
        """The text from which `place_of` reads it."""
        return f"{self.first}-{self.second}:{self.shard}"


class Entry(NamedTuple):
    """One entry of the stream of a shard."""

    place: EntryPlace
    entry_id: bytes
    fields: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Newest:
    """Entries, newest first. `has_more`: older ones are there, after the last of these."""

    entries: Sequence[Entry]
    has_more: bool
    at_ms: int


def place_of(cursor: str) -> EntryPlace | None:
    """The place that a cursor names; None for what is no cursor. Without a shard it is of 0."""
    found = _PLACE.fullmatch(cursor)
    if found is None or max(int(found[1]), int(found[2])) > _MAX_PART:
        return None
    return EntryPlace(int(found[1]), int(found[2]), int(found[3] or 0))


def newest_entries(
    queue: QueueReading,
    stream: Callable[[Keys], str],
    *,
    most: int,
    before: str | None = None,
    since_ms: int | None = None,
    until_ms: int | None = None,
) -> Newest:
    """About the newest `most` entries before a cursor and between two times, of all shards.

    BrokerUnavailable.
    """
    number = len(queue.keys)
    count = min(most, max(LEAST_OF_SHARD, -(-most // number)))
    read = partial(
        _read,
        stream=stream,
        count=count,
        before=place_of(before) if before is not None else None,
        oldest="-" if since_ms is None else str(since_ms),
        until="+" if until_ms is None else str(until_ms),
    )
    found = read_shards(read, queue.connection, queue.keys)
    parts = [
        list(_entries(rows, shard=shard)) if isinstance(rows, list) else []
        for shard, (rows, _) in enumerate(found)
    ]
    # What is older than the last entry that was read of a shard may have others of it in between.
    ends = [part[-1].place for part in parts if len(part) >= count]
    horizon = max(ends, default=EntryPlace(0, 0, 0))
    entries = sorted((one for part in parts for one in part), key=_by_place, reverse=True)
    kept = [one for one in entries if one.place >= horizon]
    return Newest(kept, bool(ends), max(now_ms for _, now_ms in found))


def _read(
    shards: Sequence[Keys],
    *,
    stream: Callable[[Keys], str],
    count: int,
    before: EntryPlace | None,
    oldest: str,
    until: str,
) -> Procedure[list[tuple[Any, int]]]:
    reads = [
        command("xrevrange", stream(keys), _newest(before, keys.shard, until), oldest, count=count)
        for keys in shards
    ]
    *found, time = yield RoundTrip((*reads, command("time")), keeps_errors=True)
    return [(rows, ms_of(time)) for rows in found]


def _newest(before: EntryPlace | None, shard: int, until: str) -> str:
    """From where a shard is read: its entries before a place, and not after a time."""
    if before is None or (until != "+" and int(until) < before.first):
        return until
    # An entry of the same id stands before the place only in an earlier shard.
    return f"{'' if shard < before.shard else '('}{before.first}-{before.second}"


def _entries(rows: Sequence[Any], *, shard: int) -> Iterator[Entry]:
    for entry_id, fields in rows:
        first, _, second = entry_id.partition(b"-")
        yield Entry(EntryPlace(int(first), int(second), shard), entry_id, fields)


def _by_place(entry: Entry) -> EntryPlace:
    return entry.place
