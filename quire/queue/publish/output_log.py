"""Reads output logs: one XREAD over many streams, each from the token its reader has come to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.errors import ProtocolError
from quire.keys import Keys
from quire.queue.streams import entries_by_stream, read_streams
from quire.transport.procedure import Procedure
from quire.wire.output import Completion, TokenChunk, split_entry_id

#: The most entries of one log taken at once; the rest comes with the next read.
MAX_ENTRIES_PER_READ = 1024

#: Tokens of one entry of this size take an event loop some milliseconds.
LONG_BYTES = 1 << 16

#: Entries of a log, one at least: their ids and fields.
Entries = Sequence[tuple[bytes, Mapping[bytes, bytes]]]

# What redis-py takes: stream -> the id to read after.
Cursors = dict[str | bytes | memoryview, str | bytes | int | memoryview]


class OutputRead:
    """What one read of a log gave to a reader of `seen` tokens: iterate over it once or again.

    Entries are taken apart as they are reached: what nobody has come to yet is as small as it came.
    Gives chunks trimmed to the reader, and the completion, if it came, as the last; ProtocolError
    in the place of an entry that is not ours.
    """

    __slots__ = ("_entries", "_request_id", "_seen")

    def __init__(self, request_id: str, entries: Entries, *, seen: int) -> None:
        self._request_id = request_id
        self._entries = entries
        self._seen = seen

    def __iter__(self) -> Iterator[TokenChunk | Completion]:
        seen = self._seen
        for entry_id, fields in self._entries:
            if b"done" in fields:
                yield Completion.from_entry(self._request_id, entry_id, fields=fields)
                return
            if b"ids" not in fields:
                raise ProtocolError(f"log entry {entry_id!r} is neither tokens nor an end")
            if chunk := TokenChunk.from_entry(entry_id, fields).after(seen):
                seen = chunk.end
                yield chunk

    @property
    def begins_long(self) -> bool:
        """Whether its first entry takes long to take apart: it has the tokens of a long prompt."""
        return bool(self._entries) and len(self._entries[0][1].get(b"ids", b"")) >= LONG_BYTES

    @property
    def chunks(self) -> tuple[TokenChunk, ...]:
        """All of them, taken apart each time."""
        return tuple(item for item in self if isinstance(item, TokenChunk))

    @property
    def completion(self) -> Completion | None:
        """The end if it came; everything is taken apart to get there."""
        return next((item for item in self if isinstance(item, Completion)), None)

    def beyond(self, seen: int) -> OutputRead | None:
        """The same for a reader of more tokens; None if there is nothing new to it.

        An end before the reader's cursor is no news for it: its log has lost a part.
        """
        last, _ = split_entry_id(self._entries[-1][0])
        return OutputRead(self._request_id, self._entries, seen=seen) if last >= seen else None


def cursors_after(keys: Keys, seen: Mapping[str, int]) -> Cursors:
    """The arguments of an XREAD for what lies beyond `seen`.

    The entry whose last token is n has the id n-<epoch>, and epochs begin at 1.
    """
    return {
        keys.output(request_id): f"{tokens}-0" if tokens else "0-0"
        for request_id, tokens in seen.items()
    }


def logs_in(reply: Any, keys: Keys, seen: Mapping[str, int]) -> dict[str, OutputRead]:
    """The logs in a reply to XREAD; streams that are not logs of `seen` are left out."""
    found = entries_by_stream(reply)
    if not found:
        # What most reads of many quiet logs bring.
        return {}
    ids = {keys.output(request_id).encode(): request_id for request_id in seen}
    return {
        request_id: OutputRead(request_id, entries, seen=seen[request_id])
        for stream, entries in found
        if (request_id := ids.get(stream))
    }


def read_output(
    keys: Keys, seen: Mapping[str, int], *, count: int, block_seconds: float | None = None
) -> Procedure[dict[str, OutputRead]]:
    """See `Side.read_output`; `count` is the most entries of one log.

    The first chunk of an answer may start beyond `seen` only if the log itself has a gap.
    """
    if not seen:
        return {}
    after = cursors_after(keys, seen)
    (reply,) = yield read_streams(after, count=count, block_seconds=block_seconds)
    return logs_in(reply, keys, seen)
