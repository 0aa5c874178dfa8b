"""The lists of requests of a shard: those that run, wait or are scheduled, a page at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import ProtocolError
from quire.keys import Keys
from quire.queue.clock import ms_of
from quire.queue.request.status import STATUS_FIELDS, RequestStatus, status_of
from quire.queue.roles import Observer
from quire.queue.workers.workers import workers_in
from quire.transport.procedure import Procedure, RoundTrip, command
from quire.wire.output import TokenChunk
from quire.wire.protocol import Priority
from service.console.reading.filters import EVERYTHING, NUM_SEARCHED, Filter

#: What a list shows of a record: its status, and since when the request runs. Not the metadata,
#: which may be long.
_FIELDS = (*(name for name in STATUS_FIELDS if name != "metadata"), "claimed_ms")

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
    """Rows from `offset` on, of `total` in this list; `num_left_out` more are in no page of it.

    With a filter `num_searched` requests were examined, and of `is_part` only these: those from
    `offset` on, up to the offset of the next page. Otherwise offset and total count those that are
    wanted.
    """

    rows: Sequence[Row]
    offset: int
    total: int
    num_left_out: int = 0
    num_searched: int | None = None
    is_part: bool = False

    @property
    def next_offset(self) -> int | None:
        following = self.offset + ((self.num_searched or 0) if self.is_part else PAGE_SIZE)
        return following if self.offset < following < self.total else None

    @property
    def previous_offset(self) -> int | None:
        if not self.offset:
            return None
        # How far the page before this one has searched is not known: back to the first.
        return max(0, self.offset - PAGE_SIZE) if not self.is_part else 0


def running(broker: Observer, *, offset: int, wanted: Filter = EVERYTHING) -> Page:
    """The running requests of a shard, the one that was claimed first at first."""
    return broker.run(_running(broker.keys, offset=offset, wanted=wanted))


def waiting(broker: Observer, *, offset: int, wanted: Filter = EVERYTHING) -> Page:
    """The queued requests of a shard in the order in which they are due, by class.

    Without turns that wait for an earlier turn of their session.
    """
    return broker.run(_waiting(broker.keys, offset=offset, wanted=wanted))


def scheduled(broker: Observer, *, offset: int, wanted: Filter = EVERYTHING) -> Page:
    """The scheduled requests of a shard, the one that is due first at first."""
    return broker.run(_scheduled(broker.keys, offset=offset, wanted=wanted))


def _running(keys: Keys, *, offset: int, wanted: Filter) -> Procedure[Page]:
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
    ordered: Sequence[bytes] = [one for _, one in sorted(zip(times, ids, strict=True))]
    num_searched = None
    if not wanted.is_empty:
        num_searched = len(ordered)
        ordered = yield from _wanted(keys, ordered, wanted, moment="claimed_ms")
    rows = yield from rows_of(keys, ordered[offset : offset + PAGE_SIZE], has_text=True)
    left_out = max(0, int(total) - len(ids))
    return Page(rows, offset, len(ordered), left_out, num_searched)


def _waiting(keys: Keys, *, offset: int, wanted: Filter) -> Procedure[Page]:
    sizes = yield RoundTrip(tuple(command("zcard", keys.rank(level)) for level in Priority))
    most = PAGE_SIZE if wanted.is_empty else NUM_SEARCHED
    reads, before = [], 0
    for level in reversed(Priority):
        first = max(0, offset - before)
        last = min(int(sizes[level]), offset + most - before) - 1
        if first <= last:
            reads.append(command("zrange", keys.rank(level), first, last))
        before += int(sizes[level])
    found = (yield RoundTrip(tuple(reads), keeps_errors=True)) if reads else []
    ids = [one for part in found if isinstance(part, list) for one in part]
    return (yield from _page(keys, ids, wanted, offset=offset, total=sum(map(int, sizes))))


def _scheduled(keys: Keys, *, offset: int, wanted: Filter) -> Procedure[Page]:
    most = PAGE_SIZE if wanted.is_empty else NUM_SEARCHED
    found, total = yield RoundTrip(
        (
            command("zrange", keys.delay, offset, offset + most - 1, withscores=True),
            command("zcard", keys.delay),
        )
    )
    due = {_text(name): int(score) for name, score in found}
    ids = [name for name, _ in found]
    return (yield from _page(keys, ids, wanted, offset=offset, total=int(total), since=due))


def _page(
    keys: Keys,
    ids: Sequence[bytes],
    wanted: Filter,
    *,
    offset: int,
    total: int,
    since: Mapping[str, int] | None = None,
) -> Procedure[Page]:
    """The page of these ids of a list from `offset` on: all, or the first ones that are wanted."""
    if wanted.is_empty:
        rows = yield from rows_of(keys, ids, has_text=False, since=since)
        return Page(rows, offset, total)
    found = yield from _wanted(keys, ids, wanted, moment="submitted_ms")
    shown = found[:PAGE_SIZE]
    num_searched = len(ids) if len(shown) == len(found) else ids.index(shown[-1]) + 1
    rows = yield from rows_of(keys, shown, has_text=False, since=since)
    return Page(rows, offset, total, num_searched=num_searched, is_part=True)


def _wanted(
    keys: Keys, ids: Sequence[bytes], wanted: Filter, *, moment: str
) -> Procedure[Sequence[bytes]]:
    """Those of these open requests that are wanted, in the same order.

    What needs the least reading is looked at first. `moment` is the field with the wanted time.
    """
    found = [one for one in ids if wanted.has_group(_text(one))]
    if wanted.tenant and found:
        # One command, and not one for each request: see `Keys.open` for what a value has.
        (values,) = yield RoundTrip((command("hmget", keys.open, found),))
        tenants = [(value or b"").rpartition(b" ")[2] for value in values]
        found = [
            one for one, name in zip(found, tenants, strict=True) if wanted.has_tenant(_text(name))
        ]
    if wanted.has_span or wanted.model:
        found = yield from _wanted_by_record(keys, found, wanted, moment=moment)
    if wanted.status:
        rows = yield from rows_of(keys, found, has_text=False)
        activities = [row.status and row.status.activity for row in rows]
        found = [
            one for one, known in zip(found, activities, strict=True) if known == wanted.status
        ]
    return found


def _wanted_by_record(
    keys: Keys, ids: Sequence[bytes], wanted: Filter, *, moment: str
) -> Procedure[list[bytes]]:
    models: dict[str, str] = {}
    if wanted.model:
        # A record does not name the model: it is that of the worker.
        (registry,) = yield RoundTrip((command("hgetall", keys.workers),))
        models = {info.name: info.model for info in workers_in(registry, now_ms=0)}
    reads = [command("hmget", keys.request(_text(one)), (moment, "worker")) for one in ids]
    *values, time = yield RoundTrip((*reads, command("time")), keeps_errors=True)
    wanted, found = wanted.at(ms_of(time)), []
    for one, fields in zip(ids, values, strict=True):
        at, worker = fields if isinstance(fields, list) else (b"", b"")
        model = models.get(_text(worker or b""))
        if wanted.has_time(int(at or 0) if _is_number(at) else None) and wanted.has_model(model):
            found.append(one)
    return found


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
