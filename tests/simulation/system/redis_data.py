"""The values a simulated Redis holds, and how they are copied to its disk. Knows no commands."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

#: The id of a stream entry.
EntryId = tuple[int, int]

FIRST_ID: EntryId = (0, 0)
LAST_ID: EntryId = ((1 << 64) - 1, (1 << 64) - 1)


class ReplyError(Exception):
    """An error reply; the text begins with its code."""


class Status(bytes):
    """A status reply, such as OK."""


class Hash(dict[bytes, bytes]):
    """A hash, its fields in the order of their birth."""


class Members(dict[bytes, None]):
    """A set; a dict, so that its order does not depend on the hash seed of the interpreter."""


class Scores(dict[bytes, float]):
    """A sorted set."""

    def ordered(self) -> list[tuple[bytes, float]]:
        return sorted(self.items(), key=lambda item: (item[1], item[0]))


@dataclass(slots=True)
class Group:
    """A consumer group. `pending`: what was delivered to be acknowledged; nothing ever is."""

    last_delivered: EntryId
    pending: set[EntryId] = field(default_factory=set)


@dataclass(slots=True)
class Stream:
    """A stream: ids and fields in parallel, both in the order of the ids."""

    ids: list[EntryId] = field(default_factory=list)
    fields: list[tuple[bytes, ...]] = field(default_factory=list)
    last_id: EntryId = FIRST_ID
    groups: dict[bytes, Group] = field(default_factory=dict)

    def between(self, first: EntryId, last: EntryId) -> range:
        """The places of the entries from `first` to `last`, both included."""
        return range(bisect_left(self.ids, first), bisect_right(self.ids, last))

    def delete(self, entry_id: EntryId) -> bool:
        place = bisect_left(self.ids, entry_id)
        if place == len(self.ids) or self.ids[place] != entry_id:
            return False
        del self.ids[place], self.fields[place]
        return True

    def keep_last(self, count: int) -> int:
        """Drops all entries but the last `count`; returns how many went."""
        surplus = max(0, len(self.ids) - count)
        del self.ids[:surplus], self.fields[:surplus]
        return surplus

    def copy(self) -> Stream:
        groups = {
            name: Group(group.last_delivered, set(group.pending))
            for name, group in self.groups.items()
        }
        return Stream(list(self.ids), list(self.fields), self.last_id, groups)


Value = bytes | Hash | Members | Scores | Stream


@dataclass(slots=True)
class Database:
    """All keys with their values, and when those that expire do, in unix ms."""

    values: dict[bytes, Value] = field(default_factory=dict)
    expiries: dict[bytes, int] = field(default_factory=dict)

    def copy(self) -> Database:
        """What a server writes to its disk."""
        values: dict[bytes, Value] = {}
        for key, value in self.values.items():
            if isinstance(value, bytes):
                values[key] = value
            elif isinstance(value, Stream):
                values[key] = value.copy()
            else:
                values[key] = type(value)(value)
        return Database(values, dict(self.expiries))


def format_id(entry_id: EntryId) -> bytes:
    return b"%d-%d" % entry_id


def parse_id(text: bytes, *, missing: int) -> EntryId:
    """An id as commands take it; `missing` stands for a sequence number that is not given."""
    if text == b"-":
        return FIRST_ID
    if text == b"+":
        return LAST_ID
    milliseconds, _, number = text.partition(b"-")
    try:
        return int(milliseconds), int(number) if number else missing
    except ValueError:
        raise ReplyError("ERR Invalid stream ID specified as stream command argument") from None
