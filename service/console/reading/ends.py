"""The ends of a queue over all its shards, newest first, a page at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import ProtocolError
from quire.wire.ends import End
from service.console.reading.filters import EVERYTHING, NUM_SEARCHED, Filter
from service.console.reading.lists import PAGE_SIZE
from service.console.reading.newest import Entry, newest_entries
from service.console.reading.queue import QueueReading


@dataclass(frozen=True, slots=True)
class EndsPage:
    """Ends, newest first; `older` is the cursor of the next ones, None if there are none.

    `num_searched`: how many ends were examined for these.
    """

    ends: Sequence[End]
    at_ms: int
    older: str | None
    num_searched: int


def ended(
    queue: QueueReading, *, before: str | None, wanted: Filter = EVERYTHING, most: int = PAGE_SIZE
) -> EndsPage:
    """The newest ends that are wanted, or those before a cursor. BrokerUnavailable."""
    if wanted.within:
        wanted = wanted.at(queue.brokers[0].now_ms())
    newest = newest_entries(
        queue,
        lambda keys: keys.ends,
        most=most if wanted.is_empty else NUM_SEARCHED,
        before=before,
        since_ms=wanted.since_ms,
        until_ms=wanted.until_ms,
    )
    ends: list[End] = []
    num_searched, last = 0, None
    for entry in newest.entries:
        num_searched, last = num_searched + 1, entry.place
        end = _end_of(entry, wanted)
        if end is not None:
            ends.append(end)
            if len(ends) == most:
                break
    has_more = newest.has_more or num_searched < len(newest.entries)
    older = last.cursor if last is not None and has_more else None
    return EndsPage(ends, newest.at_ms, older, num_searched)


def _end_of(entry: Entry, wanted: Filter) -> End | None:
    """The end in an entry; None if it is not wanted, of a batch, or cannot be read."""
    # Looked at first, because a search reads many ends that it does not show.
    if wanted.status and entry.fields.get(b"state") != wanted.status.encode():
        return None
    try:
        end = End.from_entry(entry.entry_id, entry.fields)
    except ProtocolError:
        return None
    error = (end.error.code, end.error.message) if end.error else ()
    is_wanted = (
        wanted.has_tenant(end.tenant)
        and wanted.has_group(end.request_id)
        and wanted.has_model(end.model)
        and wanted.has_error(*error)
    )
    return end if is_wanted else None
