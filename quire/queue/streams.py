"""Reads streams from cursors: output logs, the ends of groups, and the ends of a queue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.transport.procedure import RoundTrip, command

#: The cursor with which a reader begins.
FIRST_CURSOR = "0-0"

#: The largest sequence number of a stream id within its millisecond.
_LAST_NUMBER = 2**64 - 1


def at_most(seconds: float | None, longest: float) -> float | None:
    """For how many seconds a read may block; None does not wait."""
    return None if seconds is None else min(seconds, longest)


def before(position: str) -> str:
    """The cursor of a read that begins with the entry at this position."""
    if position == FIRST_CURSOR:
        return position
    time_ms, number = map(int, position.split("-"))
    return f"{time_ms}-{number - 1}" if number else f"{time_ms - 1}-{_LAST_NUMBER}"


def read_streams(after: Mapping[Any, Any], *, count: int, block_seconds: float | None) -> RoundTrip:
    """An XREAD from these cursors; None does not wait."""
    # 0 would block for ever.
    block_ms = None if block_seconds is None else max(1, int(block_seconds * 1000))
    read = command("xread", after, count=count, block=block_ms)
    return RoundTrip((read,), wait_seconds=(block_ms or 0) / 1000)


def entries_by_stream(reply: Any) -> list[tuple[bytes, Any]]:
    """The reply to XREAD or XREADGROUP as pairs of stream and entries.

    The protocols 2 and 3 of Redis have different shapes for it, and for an empty one.
    """
    if isinstance(reply, dict):
        return [(stream, entries) for stream, (entries,) in reply.items()]
    return [(stream, entries) for stream, entries in reply or []]
