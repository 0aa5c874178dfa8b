"""The lists of requests: those that run, wait, are scheduled or have ended, a page at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import ProtocolError
from quire.keys import Keys
from quire.queue.clock import ms_of
from quire.queue.request.status import STATUS_FIELDS, RequestStatus, status_of
from quire.queue.roles import Observer
from quire.transport.procedure import Procedure, RoundTrip, command
from quire.wire.ends import End
from quire.wire.output import TokenChunk
from quire.wire.protocol import Priority

#: What a list shows of a record: its status, and since when the request runs.
_FIELDS = (*STATUS_FIELDS, "claimed_ms")

#: The requests of one page.
PAGE_SIZE = 50

#: The most running requests of a shard that are sorted and shown.
MAX_RUNNING = 1000

#: The most entries of an output log that are read for the end of its text.
TAIL_ENTRIES = 6

#: The most characters of a list that are shown of an output: its end.
TAIL_LENGTH = 120

#: The largest offset of a page.
MAX_OFFSET = 10_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """One request in a list.

    `status` is None if its record is gone or cannot be read. `since_ms` is when it was first
    claimed, or for a scheduled request when it is due; `tail` is the end of its text.
    """

    request_id: str
    status: RequestStatus | None
    at_ms: int
    since_ms: int | None = None
    tail: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """Rows from `offset` on, of `total` in this list; `num_left_out` more are in no page of it."""

    rows: Sequence[Row]
    offset: int
    total: int
    num_left_out: int = 0

    @property
    def next_offset(self) -> int | None:
        following = self.offset + PAGE_SIZE
        return following if following < self.total else None

    @property
    def previous_offset(self) -> int | None:
        return max(0, self.offset - PAGE_SIZE) if self.offset else None


@dataclass(frozen=True, slots=True)
class EndsPage:
    """Ends, newest first; `older` is the cursor of the next ones, None if there are none."""

    ends: Sequence[End]
    at_ms: int
    older: str | None


def running(broker: Observer, *, offset: int) -> Page:
    """The running requests of a shard, the one that was claimed first at first."""
    return broker.run(_running(broker.keys, offset=offset))


def waiting(broker: Observer, *, offset: int) -> Page:
    """The queued requests of a shard in the order in which they are due, by class.

    Without turns that wait for an earlier turn of their session.
    """
    return broker.run(_waiting(broker.keys, offset=offset))


def scheduled(broker: Observer, *, offset: int) -> Page:
    """The scheduled requests of a shard, the one that is due first at first."""
    return broker.run(_scheduled(broker.keys, offset=offset))


def ended(broker: Observer, *, before: str | None) -> EndsPage:
    """The newest ends of a shard, or those before a cursor."""
    return broker.run(_ended(broker.keys, before=before))


def _running(keys: Keys, *, offset: int) -> Procedure[Page]:
    ids, total = yield RoundTrip(
        (
            command("zrange", keys.lease, 0, MAX_RUNNING - 1),
            command("zcard", keys.lease),
        )
    )
    if not ids:
        return Page((), offset, 0)
    # By their leases they would change their places at every renewal.
    claimed = yield RoundTrip(
        tuple(command("hget", keys.request(_text(one)), "claimed_ms") for one in ids),
        keeps_errors=True,
    )
    times = [int(value) if _is_number(value) else 0 for value in claimed]
    ordered = sorted(zip(times, ids, strict=True))
    shown = [one for _, one in ordered[offset : offset + PAGE_SIZE]]
    rows = yield from rows_of(keys, shown, has_text=True)
    return Page(rows, offset, len(ids), num_left_out=max(0, int(total) - len(ids)))


def _waiting(keys: Keys, *, offset: int) -> Procedure[Page]:
    sizes = yield RoundTrip(tuple(command("zcard", keys.rank(level)) for level in Priority))
    reads, before = [], 0
    for level in reversed(Priority):
        first = max(0, offset - before)
        last = min(int(sizes[level]), offset + PAGE_SIZE - before) - 1
        if first <= last:
            reads.append(command("zrange", keys.rank(level), first, last))
        before += int(sizes[level])
    found = (yield RoundTrip(tuple(reads), keeps_errors=True)) if reads else []
    ids = [one for part in found if isinstance(part, list) for one in part]
    rows = yield from rows_of(keys, ids, has_text=False)
    return Page(rows, offset, sum(map(int, sizes)))


def _scheduled(keys: Keys, *, offset: int) -> Procedure[Page]:
    found, total = yield RoundTrip(
        (
            command("zrange", keys.delay, offset, offset + PAGE_SIZE - 1, withscores=True),
            command("zcard", keys.delay),
        )
    )
    due = {_text(name): int(score) for name, score in found}
    rows = yield from rows_of(keys, [name for name, _ in found], has_text=False, since=due)
    return Page(rows, offset, int(total))


def _ended(keys: Keys, *, before: str | None) -> Procedure[EndsPage]:
    newest = "+" if before is None else f"({before}"
    found, time = yield RoundTrip(
        (command("xrevrange", keys.ends, newest, "-", count=PAGE_SIZE), command("time"))
    )
    ends = []
    for entry_id, fields in found:
        try:
            ends.append(End.from_entry(entry_id, fields))
        except ProtocolError:
            continue
    older = found[-1][0].decode() if len(found) == PAGE_SIZE else None
    return EndsPage(ends, ms_of(time), older)


def rows_of(
    keys: Keys,
    ids: Sequence[bytes],
    *,
    has_text: bool,
    since: Mapping[str, int] | None = None,
) -> Procedure[list[Row]]:
    """The rows of these requests of a shard, in one round trip. `since`: when each is due."""
    names = [_text(one) for one in ids]
    asked: list[Any] = []
    for name in names:
        asked.append(command("hget", keys.log_positions, name))
        asked.append(command("hmget", keys.request(name), _FIELDS))
        if has_text:
            asked.append(command("xrevrange", keys.output(name), count=TAIL_ENTRIES))
    *replies, time = yield RoundTrip((*asked, command("time")), keeps_errors=True)
    answers, rows = iter(replies), []
    for name in names:
        position, values = next(answers), next(answers)
        log = next(answers) if has_text else []
        fields = _fields(values)
        status = _status(name, position, fields, time=time)
        claimed = fields.get(b"claimed_ms")
        moment = (since or {}).get(name, int(claimed or b"") if _is_number(claimed) else None)
        rows.append(Row(name, status, ms_of(time), moment, _tail(log)))
    return rows


def _fields(values: Any) -> dict[bytes, bytes]:
    """The fields in the reply to HMGET; none if the key holds something else."""
    if not isinstance(values, list):
        return {}
    named = zip(_FIELDS, values, strict=True)
    return {name.encode(): value for name, value in named if value is not None}


def _status(
    request_id: str, position: Any, fields: Mapping[bytes, bytes], *, time: tuple[int, int]
) -> RequestStatus | None:
    """The status in these fields; None if the record is gone or cannot be read."""
    known = position if isinstance(position, bytes) else None
    try:
        return status_of(request_id, fields, position=known, time=time)
    except ProtocolError:
        return None


def _tail(log: Any) -> str:
    """The end of the text in the newest entries of a log."""
    if not isinstance(log, list):
        # The key holds something else.
        return ""
    pieces = []
    for entry_id, fields in log:
        if b"ids" not in fields:
            continue
        try:
            pieces.append(TokenChunk.from_entry(entry_id, fields).text)
        except ProtocolError:
            continue
    return "".join(reversed(pieces))[-TAIL_LENGTH:]


def _text(name: bytes) -> str:
    return name.decode(errors="replace")


def _is_number(value: Any) -> bool:
    return isinstance(value, bytes) and value.isdigit()
