"""Reads output logs: one XREAD over many streams, each from the token its reader has come to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from quire.errors import ProtocolError
from quire.keys import Keys
from quire.output import Completion, TokenChunk
from quire.turns import Turn

#: The most entries of one log taken at once; the rest comes with the next read.
MAX_ENTRIES_PER_READ = 1024

#: Entries of a log: their ids and fields.
Entries = Iterable[tuple[bytes, Mapping[bytes, bytes]]]

# What redis-py takes: stream -> the id to read after.
Positions = dict[str | bytes | memoryview, str | bytes | int | memoryview]


@dataclass(frozen=True, slots=True)
class OutputRead:
    """What one read of a log gave: chunks trimmed to the reader, and the end if it came."""

    chunks: tuple[TokenChunk, ...] = ()
    completion: Completion | None = None


def read_logs(
    connection: redis.Redis, keys: Keys, seen: Mapping[str, int], *, block_seconds: float | None
) -> dict[str, OutputRead]:
    """Reads what lies beyond `seen` (request id -> tokens the reader has) in each log.

    The first chunk of an answer may start beyond `seen` only if the log itself has a gap.
    ProtocolError for entries that are not ours.
    """
    if not seen:
        return {}
    block_ms = None if block_seconds is None else max(1, int(block_seconds * 1000))
    after = log_positions(keys, seen)
    reply = connection.xread(after, count=MAX_ENTRIES_PER_READ, block=block_ms)
    return reads_or_error(logs_in(reply, keys, seen))


def log_positions(keys: Keys, seen: Mapping[str, int]) -> Positions:
    """The arguments of an XREAD for what lies beyond `seen`.

    The entry whose last token is n has the id n-<epoch>, and epochs begin at 1.
    """
    return {
        keys.output(request_id): f"{tokens}-0" if tokens else "0-0"
        for request_id, tokens in seen.items()
    }


def reads_or_error(
    logs: Iterable[tuple[str, OutputRead | ProtocolError]],
) -> dict[str, OutputRead]:
    """The logs of a reply when all can be read; otherwise raises the first error."""
    reads: dict[str, OutputRead] = {}
    for request_id, read in logs:
        if isinstance(read, ProtocolError):
            raise read
        reads[request_id] = read
    return reads


def logs_in(
    reply: Any, keys: Keys, seen: Mapping[str, int]
) -> Iterator[tuple[str, OutputRead | ProtocolError]]:
    """The logs in a reply to XREAD; streams that are not logs of `seen` are left out.

    ProtocolError stands in the place of a log that has an entry which is not ours.
    """
    for request_id, entries in _logs(reply, keys, seen):
        try:
            yield request_id, read_entries(request_id, entries, seen=seen[request_id])
        except ProtocolError as error:
            yield request_id, error


async def logs_in_turns(
    reply: Any, keys: Keys, seen: Mapping[str, int]
) -> list[tuple[str, OutputRead | ProtocolError]]:
    """The same in an event loop, whose others get on meanwhile.

    With all log-probabilities a thousand tokens take a tenth of a second to read.
    """
    found: list[tuple[str, OutputRead | ProtocolError]] = []
    async with Turn() as turn:
        for request_id, entries in _logs(reply, keys, seen):
            items: list[TokenChunk | Completion] = []
            try:
                for item in _items(request_id, entries, seen=seen[request_id]):
                    items.append(item)
                    if turn.is_over:
                        await turn.next()
            except ProtocolError as error:
                found.append((request_id, error))
            else:
                found.append((request_id, _read_of(items)))
    return found


def entries_by_stream(reply: Any) -> list[tuple[bytes, Any]]:
    """The reply to XREAD or XREADGROUP as pairs of stream and entries.

    The protocols 2 and 3 of Redis have different shapes for it, and for an empty one.
    """
    if isinstance(reply, dict):
        return [(stream, entries) for stream, (entries,) in reply.items()]
    return [(stream, entries) for stream, entries in reply or []]


def read_entries(request_id: str, entries: Entries, *, seen: int) -> OutputRead:
    """Parses the entries of one log in order, leaving out what a reader of `seen` tokens has."""
    return _read_of(list(_items(request_id, entries, seen=seen)))


def _logs(reply: Any, keys: Keys, seen: Mapping[str, int]) -> Iterator[tuple[str, Entries]]:
    found = entries_by_stream(reply)
    if not found:
        # What most reads of many quiet logs bring.
        return
    ids = {keys.output(request_id).encode(): request_id for request_id in seen}
    for stream, entries in found:
        if request_id := ids.get(stream):
            yield request_id, entries


def _items(request_id: str, entries: Entries, *, seen: int) -> Iterator[TokenChunk | Completion]:
    """What a reader of `seen` tokens lacks, entry by entry; a completion is the last."""
    for entry_id, fields in entries:
        if b"done" in fields:
            yield Completion.from_entry(request_id, entry_id, fields=fields)
            return
        if b"ids" not in fields:
            raise ProtocolError(f"log entry {entry_id!r} is neither tokens nor an end")
        if chunk := TokenChunk.from_entry(entry_id, fields).after(seen):
            seen = chunk.end
            yield chunk


def _read_of(items: Sequence[TokenChunk | Completion]) -> OutputRead:
    chunks = tuple(item for item in items if isinstance(item, TokenChunk))
    completion = items[-1] if items and isinstance(items[-1], Completion) else None
    return OutputRead(chunks, completion)
