"""The groups of a queue: those that its newest ends and its next requests name, and one of them.

Nothing counts the groups of a queue, so they are found where requests are at work: a limited number
of the running, waiting and scheduled requests and of the newest ends. A group that is in none of
them is still found by its name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.errors import InvalidRequest, ProtocolError, UnknownRequest
from quire.keys import GROUP_SEPARATOR, Keys
from quire.queue.groups.grouping import GroupEnd, counts_of, ends_in
from quire.queue.submit.routing import check_group_name
from quire.queue.view.inspection import read_shards
from quire.records import State
from quire.transport.procedure import Procedure, RoundTrip, command
from service.console.reading.lists import Row, rows_of
from service.console.reading.newest import newest_entries
from service.console.reading.queue import QueueReading

#: The most groups of a list, and the most pairs of a group and a shard whose counts are read.
MAX_GROUPS, MAX_PARTS = 50, 1600

#: How many ends are searched for the names of groups, and how many ids at each end of a set.
NUM_ENDS, NUM_IDS = 500, 250

#: How often a set of members is looked at for them: a set that has shrunk has gaps.
MAX_LOOKS = 8

#: The ends and the open members on the page of a group.
NUM_SHOWN_ENDS, NUM_MEMBERS = 50, 25


@dataclass(frozen=True, slots=True)
class GroupState:
    """One group over all shards. `ended_ms` is the time of its last end, None before the first.

    `counts` is empty for a group that is gone.
    """

    name: str
    counts: Mapping[State, int]
    ended_ms: int | None = None

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def num_ended(self) -> int:
        return sum(number for state, number in self.counts.items() if state.is_terminal)

    @property
    def num_open(self) -> int:
        return self.total - self.num_ended

    @property
    def share(self) -> float:
        """Its ended requests as a share of all, 0 to 1."""
        return self.num_ended / self.total if self.total else 0.0

    def number(self, *states: str) -> int:
        """How many of its requests are in these states."""
        return sum(self.counts.get(State(state), 0) for state in states)


@dataclass(frozen=True, slots=True)
class GroupsState:
    """The groups that were found, open ones first. `num_more` others are not shown."""

    groups: Sequence[GroupState]
    num_more: int
    num_searched: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class GroupLife:
    """One group: its newest ends, and some members that have not ended."""

    state: GroupState
    ends: Sequence[GroupEnd]
    open: Sequence[Row]
    at_ms: int
    older: str | None


def groups_of(queue: QueueReading) -> GroupsState:
    """The groups at work and those that ended last. BrokerUnavailable, ProtocolError."""
    newest = newest_entries(queue, lambda keys: keys.ends, most=NUM_ENDS)
    found = read_shards(_open_ids, queue.connection, queue.keys)
    open_ids = [one for ids in found for one in ids]
    ended_ids = [entry.fields.get(b"id", b"") for entry in newest.entries]
    # In this order: those at work first, then those whose end is the newest.
    names = list(dict.fromkeys(filter(None, map(_group_in, [*open_ids, *ended_ids]))))
    shown = names[: min(MAX_GROUPS, max(1, MAX_PARTS // len(queue.keys)))]
    states = [one for one in _states(queue, shown) if one.total]
    return GroupsState(
        groups=sorted(states, key=lambda one: (not one.num_open, -(one.ended_ms or 0), one.name)),
        num_more=len(names) - len(shown),
        num_searched=len(set(open_ids)) + len(ended_ids),
        at_ms=newest.at_ms,
    )


def group_of(queue: QueueReading, name: str, *, before: str | None) -> GroupLife:
    """One group, and its ends before a cursor. UnknownRequest, BrokerUnavailable, ProtocolError."""
    (state,) = _states(queue, [name])
    if not state.total:
        raise UnknownRequest(name, "no such group, or it has expired")
    newest = newest_entries(
        queue, lambda keys: keys.of_group(name)[2], most=NUM_SHOWN_ENDS, before=before
    )
    shown = newest.entries[:NUM_SHOWN_ENDS]
    ends = []
    for entry in shown:
        try:
            ends += ends_in([(entry.entry_id, entry.fields)])
        except ProtocolError:
            continue
    has_more = newest.has_more or len(shown) < len(newest.entries)
    return GroupLife(
        state=state,
        ends=ends,
        open=_open_rows(queue, name),
        at_ms=newest.at_ms,
        older=shown[-1].place.cursor if shown and has_more else None,
    )


def open_members(queue: QueueReading, name: str, *, most: int) -> Iterator[tuple[int, list[str]]]:
    """Each shard, with some of the group's requests in it that have not ended: `most` in all."""
    for shard, broker in enumerate(queue.brokers):
        names = broker.run(_members(broker.keys.of_group(name)[1], most=most))
        most -= len(names)
        if names:
            yield shard, names
        if most <= 0:
            return


def _members(key: str, *, most: int) -> Procedure[list[str]]:
    # Not SMEMBERS: a group has any number of members. Two looks at an unchanged set find the same.
    found: dict[str, None] = {}
    cursor = 0
    for _ in range(MAX_LOOKS):
        ((cursor, names),) = yield RoundTrip((command("sscan", key, cursor, count=most),))
        found |= dict.fromkeys(name.decode(errors="replace") for name in names)
        if cursor == 0 or len(found) >= most:
            break
    return list(found)[:most]


def _open_rows(queue: QueueReading, name: str) -> Sequence[Row]:
    """Some open members of the group, in the order of their names."""
    rows: list[Row] = []
    for shard, names in open_members(queue, name, most=NUM_MEMBERS):
        broker = queue.brokers[shard]
        ids = [one.encode() for one in names]
        rows += broker.run(rows_of(broker.keys, ids, has_text=True))
    return sorted(rows, key=lambda row: row.request_id)


def _open_ids(shards: Sequence[Keys]) -> Procedure[list[list[bytes]]]:
    """Ids of running, waiting and scheduled requests of each shard: both ends of each set."""
    sets = [[keys.lease, *reversed(keys.all_ranks), keys.delay] for keys in shards]
    each = max(1, NUM_IDS // len(shards))
    reads = tuple(
        command(name, key, 0, each - 1)
        for keys in sets
        for key in keys
        for name in ("zrange", "zrevrange")
    )
    replies = iter((yield RoundTrip(reads, keeps_errors=True)))
    found = []
    for keys in sets:
        parts = [next(replies) for _ in range(2 * len(keys))]
        found.append([one for part in parts if isinstance(part, list) for one in part])
    return found


def _states(queue: QueueReading, names: Sequence[str]) -> list[GroupState]:
    """The states of these groups. One whose counts nobody can read has none."""
    if not names:
        return []
    parts = read_shards(partial(_parts, names=names), queue.connection, queue.keys)
    return [_whole(name, [part[number] for part in parts]) for number, name in enumerate(names)]


def _parts(
    shards: Sequence[Keys], *, names: Sequence[str]
) -> Procedure[list[list[tuple[Any, Any]]]]:
    """What each shard has of each group: the counts, and the last end."""
    reads = []
    for keys in shards:
        for counts, _, ends in map(keys.of_group, names):
            reads += [command("hgetall", counts), command("xrevrange", ends, count=1)]
    replies = iter((yield RoundTrip(tuple(reads), keeps_errors=True)))
    return [[(next(replies), next(replies)) for _ in names] for _ in shards]


def _whole(name: str, parts: Sequence[tuple[Any, Any]]) -> GroupState:
    counts: dict[State, int] = {}
    ended = []
    for fields, entries in parts:
        try:
            for state, number in counts_of(fields if isinstance(fields, dict) else {}).items():
                counts[state] = counts.get(state, 0) + number
        except ProtocolError:
            continue
        if isinstance(entries, list):
            ended += [int(entry_id.partition(b"-")[0]) for entry_id, _ in entries]
    return GroupState(name, counts, max(ended, default=None))


def _group_in(request_id: bytes) -> str | None:
    """The group that an id names; None without one, and for what is no name."""
    group, separator, _ = request_id.decode(errors="replace").partition(GROUP_SEPARATOR)
    try:
        return check_group_name(group) if separator else None
    except InvalidRequest:
        return None
