"""The dead letters of a shard, a page at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.errors import InvalidRequest, ProtocolError, UnknownRequest
from quire.queue.clock import ms_of
from quire.queue.repair.dead_letters import DeadLetter, dead_letter_of
from quire.queue.roles import Observer
from quire.transport.procedure import Procedure, RoundTrip, command
from quire.wire.output import split_entry_id
from quire.wire.protocol import GenerationRequest
from service.console.reading.filters import EVERYTHING, Filter
from service.console.reading.newest import place_of
from service.console.reading.request import Asked, asked_of

#: The most letters of one page, how many are read at once, and after how many bytes of requests
#: no more are read.
PAGE_SIZE, READ_SIZE, MAX_BYTES = 25, 5, 4 << 20

#: The most letters that a search examines, and about how many bytes it reads at once.
NUM_SEARCHED, SEARCH_BYTES = 500, 256 << 10


@dataclass(frozen=True, slots=True)
class ShownLetter:
    """A dead letter. `written_ms` is when it was written; `kind` is empty if nobody can read it."""

    letter: DeadLetter
    written_ms: int
    asked: Asked


@dataclass(frozen=True, slots=True)
class LettersPage:
    """Letters, newest first; `older` is the cursor of the next ones, None if there are none.

    `num_searched`: how many letters were examined for these.
    """

    letters: Sequence[ShownLetter]
    total: int
    at_ms: int
    older: str | None
    num_searched: int


def letters_of(broker: Observer, *, before: str | None, wanted: Filter = EVERYTHING) -> LettersPage:
    """The newest dead letters that are wanted, or those before a cursor."""
    return broker.run(_letters(broker, before=before, wanted=wanted))


def letter_with(broker: Observer, entry_id: str) -> DeadLetter:
    """One dead letter. UnknownRequest if it is gone."""

    def read() -> Procedure[DeadLetter]:
        (found,) = yield RoundTrip((command("xrange", broker.keys.dead, entry_id, entry_id),))
        if not found:
            raise UnknownRequest(entry_id, "no such dead letter")
        return dead_letter_of(*found[0])

    return broker.run(read())


def _letters(broker: Observer, *, before: str | None, wanted: Filter) -> Procedure[LettersPage]:
    key = broker.keys.dead
    total, time = yield RoundTrip((command("xlen", key), command("time")))
    now_ms = ms_of(time)
    wanted = wanted.at(now_ms)
    newest, oldest = _span(before, wanted)
    letters: list[ShownLetter] = []
    num_bytes = num_read = 0
    size, older = READ_SIZE, None
    while older is None:
        (found,) = yield RoundTrip((command("xrevrange", key, newest, oldest, count=size),))
        for entry_id, fields in found:
            num_bytes += sum(map(len, fields.values()))
            num_read += 1
            if (letter := _letter(entry_id, fields, wanted)) is not None:
                letters.append(letter)
            if len(letters) == PAGE_SIZE or num_bytes >= MAX_BYTES or num_read >= NUM_SEARCHED:
                older = entry_id.decode()
                break
        if len(found) < size and older is None:
            break
        newest = f"({found[-1][0].decode()}"
        if not wanted.is_empty:
            # Most of what a search reads is not shown.
            size = min(100, max(READ_SIZE, SEARCH_BYTES * num_read // max(1, num_bytes)))
    return LettersPage(letters, int(total), now_ms, older, num_read)


def _span(before: str | None, wanted: Filter) -> tuple[str, str]:
    """The newest and the oldest entry id that are read: an id begins with its time."""
    newest = "+" if wanted.until_ms is None else str(wanted.until_ms)
    place = place_of(before) if before is not None else None
    if place is not None and (wanted.until_ms is None or place.first <= wanted.until_ms):
        newest = f"({place.first}-{place.second}"
    return newest, "-" if wanted.since_ms is None else str(wanted.since_ms)


def _letter(entry_id: bytes, fields: Mapping[bytes, bytes], wanted: Filter) -> ShownLetter | None:
    """The letter in an entry; None if it is not wanted or cannot be read."""
    try:
        letter = dead_letter_of(entry_id, fields)
    except ProtocolError:
        return None
    tenant = fields.get(b"tenant", b"").decode(errors="replace")
    is_wanted = (
        wanted.has_tenant(tenant)
        and wanted.has_group(letter.request_id)
        and wanted.has_error(letter.reason)
    )
    return _shown(letter) if is_wanted else None


def _shown(letter: DeadLetter) -> ShownLetter:
    written_ms, _ = split_entry_id(letter.entry_id.encode())
    try:
        asked = asked_of(GenerationRequest.decode(letter.original))
    except (ProtocolError, InvalidRequest) as error:
        asked = Asked(trouble=f"The request cannot be read: {error}")
    return ShownLetter(letter, written_ms, asked)
