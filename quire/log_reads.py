"""What one XREAD over many output logs is asked, and what its reply says; knows no connection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quire.errors import ProtocolError
from quire.keys import Keys
from quire.output_log import OutputRead, entries_by_stream, read_entries

# What redis-py takes: stream -> the id to read after.
Positions = dict[str | bytes | memoryview, str | bytes | int | memoryview]


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
    ids = {keys.output(request_id).encode(): request_id for request_id in seen}
    for stream, entries in entries_by_stream(reply):
        if request_id := ids.get(stream):
            try:
                yield request_id, read_entries(request_id, entries, seen=seen[request_id])
            except ProtocolError as error:
                yield request_id, error
