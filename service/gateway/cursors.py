"""Cursors: how far a caller has read, encoded in the `id` of each event of its stream.

An id has one cursor for each choice, separated by commas. A cursor is the number of tokens that the
caller has, then after a slash the hash of those tokens (see quire/wire/history.py), then `/end` if
the caller also has the end: `57`, `57/331.22`, `57/331.22/end,12/4.5`. The hash shows whether this
is still the log that the caller knows: Redis may have lost that one, and a worker may have written
other tokens. A number alone is valid, too. The id of the event with the usage has `/usage` at its
end: `57/331.22/end/usage`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from quire.errors import InvalidRequest
from quire.wire.output import TokenChunk, is_prefix_hash

#: The header with the last id that a reconnecting caller has received; browsers send it, too.
LAST_EVENT_ID = "Last-Event-ID"

#: Marks the cursor of a choice whose end the caller has.
_END = "end"

#: Ends the id if the caller has the usage.
_USAGE = "/usage"

#: More digits than the token count of any output has.
_MAX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a caller is in the stream of one choice; an unknown `prefix_hash` is empty."""

    num_tokens: int = 0
    prefix_hash: str = ""
    has_end: bool = False

    @classmethod
    def after(cls, chunk: TokenChunk) -> "Cursor":
        """The cursor after a chunk."""
        return cls(chunk.end, chunk.prefix_hash)

    def __str__(self) -> str:
        parts = [str(self.num_tokens), self.prefix_hash, _END if self.has_end else ""]
        return "/".join(parts).rstrip("/")


@dataclass(frozen=True, slots=True)
class LastEvent:
    """How far a caller has read, from the id of the last event that it received."""

    cursors: list[Cursor]
    has_usage: bool = False

    def has_all(self, *, include_usage: bool) -> bool:
        """Whether the caller has the complete answer, with the usage if `include_usage`."""
        has_ends = all(cursor.has_end for cursor in self.cursors)
        return has_ends and (self.has_usage or not include_usage)


def event_id(cursors: Iterable[Cursor], *, has_usage: bool = False) -> str:
    """The id of an event after which a caller is at these cursors."""
    return ",".join(map(str, cursors)) + (_USAGE if has_usage else "")


def last_event_of(text: str, num_choices: int) -> LastEvent:
    """Parses an id. InvalidRequest if it is not one of a stream with `num_choices` choices."""
    has_usage = text.endswith(_USAGE)
    cursors = [_cursor_of(part.strip()) for part in text.removesuffix(_USAGE).split(",")]
    if len(cursors) != num_choices:
        raise InvalidRequest(
            LAST_EVENT_ID, f"has {len(cursors)} cursors, for {num_choices} choices"
        )
    return LastEvent(cursors, has_usage)


def _cursor_of(text: str) -> Cursor:
    number, *more = text.split("/")
    prefix_hash, end = (*more, "", "")[:2]
    is_number = number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS
    is_hash = not prefix_hash or is_prefix_hash(prefix_hash)
    if not is_number or not is_hash or end not in ("", _END) or len(more) > 2:
        raise InvalidRequest(LAST_EVENT_ID, "must be the id of an event, or a number of tokens")
    return Cursor(int(number), prefix_hash, has_end=end == _END)
