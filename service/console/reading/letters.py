"""The dead letters of a shard, a page at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import InvalidRequest, ProtocolError, UnknownRequest
from quire.queue.clock import ms_of
from quire.queue.repair.dead_letters import DeadLetter, dead_letter_of
from quire.queue.roles import Observer
from quire.transport.procedure import Procedure, RoundTrip, command
from quire.wire.output import split_entry_id
from quire.wire.protocol import GenerationRequest
from service.console.reading.request import Asked, asked_of

#: The most letters of one page, how many are read at once, and after how many bytes of requests
#: no more are read.
PAGE_SIZE, READ_SIZE, MAX_BYTES = 25, 5, 4 << 20


@dataclass(frozen=True, slots=True)
class ShownLetter:
    """A dead letter. `written_ms` is when it was written; `kind` is empty if nobody can read it."""

    letter: DeadLetter
    written_ms: int
    asked: Asked


@dataclass(frozen=True, slots=True)
class LettersPage:
    """Letters, newest first; `older` is the cursor of the next ones, None if there are none."""

    letters: Sequence[ShownLetter]
    total: int
    at_ms: int
    older: str | None


def letters_of(broker: Observer, *, before: str | None) -> LettersPage:
    """The newest dead letters, or those before a cursor."""
    return broker.run(_letters(broker, before=before))


def letter_with(broker: Observer, entry_id: str) -> DeadLetter:
    """One dead letter. UnknownRequest if it is gone."""

    def read() -> Procedure[DeadLetter]:
        (found,) = yield RoundTrip((command("xrange", broker.keys.dead, entry_id, entry_id),))
        if not found:
            raise UnknownRequest(entry_id, "no such dead letter")
        return dead_letter_of(*found[0])

    return broker.run(read())


def _letters(broker: Observer, *, before: str | None) -> Procedure[LettersPage]:
    key = broker.keys.dead
    total, time = yield RoundTrip((command("xlen", key), command("time")))
    letters: list[ShownLetter] = []
    newest, older = "+" if before is None else f"({before}", None
    num_bytes = num_read = 0
    while True:
        (found,) = yield RoundTrip((command("xrevrange", key, newest, "-", count=READ_SIZE),))
        for entry_id, fields in found:
            num_bytes += sum(map(len, fields.values()))
            try:
                letters.append(_shown(dead_letter_of(entry_id, fields)))
            except ProtocolError:
                continue
        num_read += len(found)
        if len(found) < READ_SIZE:
            break
        older = found[-1][0].decode()
        if num_read >= PAGE_SIZE or num_bytes >= MAX_BYTES:
            return LettersPage(letters, int(total), ms_of(time), older)
        newest = f"({older}"
    return LettersPage(letters, int(total), ms_of(time), None)


def _shown(letter: DeadLetter) -> ShownLetter:
    written_ms, _ = split_entry_id(letter.entry_id.encode())
    try:
        asked = asked_of(GenerationRequest.decode(letter.original))
    except (ProtocolError, InvalidRequest) as error:
        asked = Asked(trouble=f"The request cannot be read: {error}")
    return ShownLetter(letter, written_ms, asked)
