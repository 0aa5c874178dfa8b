"""The cursor of a reader of ends in one shard, which holds after Redis has lost ends.

Positions are times of Redis. A Redis that lost its last ends, and whose clock is behind, writes the
next ends before the position of a reader that has seen the lost ones, or to the same position. So
the cursor has earlier positions besides the last one, each with a digest of its end. The reader
continues after the newest end that is still there.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from quire.errors import InvalidRequest
from quire.queue.streams import FIRST_CURSOR, before
from quire.wire.ends import End

#: If the queue has several shards, how long a reader waits for one before it reads the next.
SHARD_SECONDS = 0.05

#: A cursor has the last so many ends: after the loss of fewer no other end comes again.
NUM_LAST = 16

#: The most ends of one cursor. Those before the last ones are at times that about double.
MAX_SEEN = 112

_NUMBER = r"(?:0|[1-9][0-9]{0,19})"
_SEEN = re.compile(rf"({_NUMBER})-({_NUMBER})(?:\.([A-Za-z0-9_-]{{4}}))?")

#: The largest number in a stream id.
_LARGEST = 2**64 - 1


class _Seen(NamedTuple):
    """An end at `<time_ms>-<number>`; a cursor of an earlier version has no digest."""

    time_ms: int
    number: int
    digest: str

    @property
    def position(self) -> str:
        return f"{self.time_ms}-{self.number}"

    def is_at(self, ends: Sequence[End]) -> bool:
        """Whether these begin with this end."""
        return bool(ends) and self in (seen := _seen(ends[0]), seen._replace(digest=""))


class ShardCursor:
    """What a reader has seen of the ends of one shard.

    As text: the ends separated by colons, the newest first, each as `<time>-<number>.<digest>`. The
    time is in unix ms for the first, and for each other one by how much it is before the one that
    precedes it. The text of a reader that has seen nothing is `0-0`.
    """

    def __init__(self, text: str = FIRST_CURSOR) -> None:
        """ValueError for a text that is none of a cursor."""
        #: The newest first.
        self._seen: list[_Seen] = []
        for part in text.split(":", MAX_SEEN) if text != FIRST_CURSOR else ():
            found = _SEEN.fullmatch(part)
            if found is None or len(self._seen) == MAX_SEEN:
                raise ValueError("not a cursor")
            time_ms, number = int(found[1]), int(found[2])
            if self._seen:
                time_ms = self._seen[-1].time_ms - time_ms
            if not (0 <= time_ms <= _LARGEST and number <= _LARGEST):
                raise ValueError("not the id of an entry")
            self._seen.append(_Seen(time_ms, number, found[3] or ""))

    def __str__(self) -> str:
        parts, newer_ms = list[str](), 0
        for time_ms, number, digest in self._seen:
            parts.append(f"{abs(time_ms - newer_ms)}-{number}{digest and '.'}{digest}")
            newer_ms = time_ms
        return ":".join(parts) or FIRST_CURSOR

    @property
    def newest(self) -> str:
        """The position of the last end that was seen."""
        return self._seen[0].position if self._seen else FIRST_CURSOR

    def add(self, end: End) -> None:
        """The reader has seen this end, which is after all others."""
        self._seen.insert(0, _seen(end))
        now_ms = self._seen[0].time_ms
        kept, earlier = self._seen[:NUM_LAST], self._seen[NUM_LAST:]
        # Leaves out those of which both neighbours are about as old.
        for this, older in pairwise(earlier):
            if now_ms - older.time_ms > 2 * (now_ms - kept[-1].time_ms):
                kept.append(this)
        self._seen = [*kept, *earlier[-1:]][:MAX_SEEN]

    @property
    def before_newest(self) -> str:
        """The position after which a read begins with the last end that was seen."""
        return before(self.newest)

    def unseen(self, ends: Sequence[End]) -> Sequence[End] | None:
        """The ends that were not seen, of those after `before_newest`.

        None if the last end that was seen is lost. Then the cursor forgets it: read again. So the
        ends between the newest that is still there and the next one in this cursor come again.
        """
        if not self._seen:
            return ends
        if self._seen[0].is_at(ends):
            return ends[1:]
        del self._seen[0]
        return None


def cursors_in(after: str, *, num_shards: int) -> list[ShardCursor]:
    """The cursors of all shards; an empty text is before the oldest end kept. InvalidRequest."""
    texts = after.split(",", num_shards) if after else [FIRST_CURSOR] * num_shards
    try:
        cursors = list(map(ShardCursor, texts))
    except ValueError:
        cursors = []
    if len(cursors) != num_shards:
        raise InvalidRequest("after", f"must be the position of an end in {num_shards} shards")
    return cursors


def _seen(end: End) -> _Seen:
    time_ms, number = map(int, end.position.split("-"))
    text = f"{end.request_id} {end.submitted_at} {end.state}"
    digest = hashlib.blake2s(text.encode(), digest_size=3).digest()
    return _Seen(time_ms, number, base64.urlsafe_b64encode(digest).decode())
