"""How far a caller has read, encoded in the `id` of each event of its stream.

An id has a place for each choice, separated by commas. A place is the number of tokens the caller
has, then after a slash the hash of those tokens (see quire/wire/history.py), then `/end` if it has
the end as well: `57`, `57/331.22`, `57/331.22/end,12/4.5`. The hash tells a log that Redis lost and
a worker wrote again from the one the caller knows. A number alone is valid, too. The id of the
event with the usage has `/usage` at its end: `57/331.22/end/usage`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from quire.errors import InvalidRequest
from quire.wire.output import TokenChunk, is_prefix_hash

#: The header with the last id that a reconnecting caller has got; browsers send it, too.
LAST_EVENT_ID = "Last-Event-ID"

#: Marks the place of a choice whose end the caller has.
_END = "end"

#: Ends the id if the caller has the usage.
_USAGE = "/usage"

#: More digits than the token count of any output has.
_MAX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Place:
    """The place in one choice; `prefix_hash` is empty where it is not known."""

    num_tokens: int = 0
    prefix_hash: str = ""
    has_end: bool = False

    @classmethod
    def behind(cls, chunk: TokenChunk) -> "Place":
        """The place after a chunk."""
        return cls(chunk.end, chunk.prefix_hash)

    def __str__(self) -> str:
        parts = [str(self.num_tokens), self.prefix_hash, _END if self.has_end else ""]
        return "/".join(parts).rstrip("/")


@dataclass(frozen=True, slots=True)
class LastEvent:
    """What a caller has of a stream, from the id of the last event it got."""

    places: list[Place]
    has_usage: bool = False

    def has_all(self, *, include_usage: bool) -> bool:
        """Whether the caller has the whole answer, with the usage if it wants that."""
        has_ends = all(place.has_end for place in self.places)
        return has_ends and (self.has_usage or not include_usage)


def event_id(places: Iterable[Place], *, has_usage: bool = False) -> str:
    """The id of an event after which a caller is at these places."""
    return ",".join(map(str, places)) + (_USAGE if has_usage else "")


def last_event_of(text: str, num_choices: int) -> LastEvent:
    """Parses an id. InvalidRequest if it is not one of a stream with `num_choices` choices."""
    has_usage = text.endswith(_USAGE)
    places = [_place_of(part.strip()) for part in text.removesuffix(_USAGE).split(",")]
    if len(places) != num_choices:
        raise InvalidRequest(LAST_EVENT_ID, f"has {len(places)} places, for {num_choices} choices")
    return LastEvent(places, has_usage)


def _place_of(text: str) -> Place:
    number, *more = text.split("/")
    prefix_hash, end = (*more, "", "")[:2]
    is_number = number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS
    is_hash = not prefix_hash or is_prefix_hash(prefix_hash)
    if not is_number or not is_hash or end not in ("", _END) or len(more) > 2:
        raise InvalidRequest(LAST_EVENT_ID, "must be the id of an event, or a number of tokens")
    return Place(int(number), prefix_hash, has_end=end == _END)
