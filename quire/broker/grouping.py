"""What a producer asks of the broker about groups: requests that were submitted as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.broker.shard import Shard
from quire.errors import QuireError
from quire.keys import GROUP_SEPARATOR
from quire.transitions.calls import cancel_call
from quire.transitions.output_log import entries_by_stream
from quire.transitions.replies import reading
from quire.transport.script_runner import raise_if_error
from quire.wire.output import State

#: Where a reader of a group's ends begins.
FIRST_POSITION = "0-0"

#: The most ends taken by one read.
MAX_ENDS_PER_READ = 256

#: The most leases that are over of which one look finds out whose they are: a millisecond.
MAX_LEASES = 4096

#: The largest number of a position within its millisecond.
_LAST_NUMBER = 2**64 - 1


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """One member of a group came to an end. `position` is where to read on."""

    position: str
    request_id: str
    state: State


class EndsPlace:
    """How far one reader of a group's ends has come in one shard.

    Positions are times of Redis. One that lost its last ends, and whose clock is behind, as a
    replica's may be, writes the next ones before the place of a reader that has seen those. So each
    read begins at the last end that was seen: if another one stands there, all begins anew.
    """

    def __init__(self) -> None:
        self._last: GroupEnd | None = None

    @property
    def position(self) -> str:
        """Where to wait for the next end."""
        return self._last.position if self._last else FIRST_POSITION

    @property
    def overlap(self) -> str:
        """Where to read on, so that the last end that was seen comes again."""
        if self._last is None:
            return FIRST_POSITION
        time_ms, number = map(int, self._last.position.split("-"))
        return f"{time_ms}-{number - 1}" if number else f"{time_ms - 1}-{_LAST_NUMBER}"

    def take(self, ends: Sequence[GroupEnd]) -> Sequence[GroupEnd] | None:
        """What is new of that which was read from `overlap` on; None if all begins anew."""
        if self._last is not None:
            if not ends or ends[0] != self._last:
                self._last = None
                return None
            ends = ends[1:]
        if ends:
            self._last = ends[-1]
        return ends


class Grouping(Shard):
    """The side of a Broker that knows groups; each shard knows only its own part of one."""

    def group_counts(self, group: str) -> dict[State, int]:
        """How many of the group's requests are in each state; empty when there is no such group."""
        key, _, _ = self.keys.of_group(group)
        fields: Any = self._retrying(lambda: self._connection.hgetall(key))
        return counts_of(fields)

    def open_members(self, group: str) -> list[str]:
        """The ids of the group's requests that have not ended, sorted."""
        _, key, _ = self.keys.of_group(group)
        members: Any = self._retrying(lambda: self._connection.smembers(key))
        return sorted(member.decode() for member in members)

    def num_open_members(self, group: str) -> int:
        """How many of the group's requests have not ended."""
        _, key, _ = self.keys.of_group(group)
        number: Any = self._retrying(lambda: self._connection.scard(key))
        return int(number)

    def read_ends(
        self, group: str, *, after: str = FIRST_POSITION, block_seconds: float | None = None
    ) -> list[GroupEnd]:
        """The ends that came after a position, in order; waits for one as `read_output` does."""
        _, _, key = self.keys.of_group(group)
        block = block_ms(block_seconds, longest=self._longest_block)
        reply = self._retrying(
            lambda: self._connection.xread({key: after}, count=MAX_ENDS_PER_READ, block=block),
            wait_seconds=(block or 0) / 1000,
        )
        return ends_of(reply)

    def cancel_many(self, request_ids: Sequence[str]) -> dict[str, State]:
        """Cancels many requests in few round trips; unknown ones are missing from the answer."""
        calls = [cancel_call(self.keys, request_id) for request_id in request_ids]
        return states_of(request_ids, self._scripts.run_many("cancel", calls))


def counts_of(fields: Mapping[bytes, bytes]) -> dict[State, int]:
    """Reads the counts of a group. ProtocolError."""
    with reading("a count of the group"):
        counts = {State(name.decode()): int(count) for name, count in fields.items()}
    return {state: count for state, count in counts.items() if count}


def block_ms(seconds: float | None, *, longest: float) -> int | None:
    """How long an XREAD blocks. Never 0, which would be for ever."""
    return None if seconds is None else max(1, int(1000 * min(seconds, longest)))


def ends_of(reply: Any) -> list[GroupEnd]:
    """Reads what an XREAD of the ends of one group answered. ProtocolError."""
    with reading("an end in the group"):
        return [
            GroupEnd(entry_id.decode(), fields[b"id"].decode(), State(fields[b"state"].decode()))
            for _, entries in entries_by_stream(reply)
            for entry_id, fields in entries
        ]


def states_of(request_ids: Sequence[str], replies: Sequence[Any]) -> dict[str, State]:
    """Reads what CANCEL answered for each; unknown ones are missing. Raises the first error."""
    return {
        request_id: State(reply.decode())
        for request_id, reply in zip(request_ids, map(raise_if_error, replies), strict=True)
        if reply
    }


def ended_of(request_ids: Sequence[str], replies: Sequence[Any]) -> dict[str, State]:
    """Reads what EXPIRE answered, asked for one at a time; those it let be are missing.

    Raises the first error.
    """
    states = [reply if isinstance(reply, QuireError) else reply[0] for reply in replies]
    return states_of(request_ids, states)


def overdue_in(rows: Sequence[Sequence[bytes]], group: str) -> list[str]:
    """The ids for `Broker.overdue`: of those that waited too long, and of leases that are over."""
    waiting, running = ([name.decode() for name in row if name.isascii()] for row in rows)
    own = f"{group}{GROUP_SEPARATOR}"
    return waiting + [name for name in running if name.startswith(own)]
