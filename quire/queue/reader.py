"""How a thread waits for logs: each reads for itself, over a connection of its own meanwhile.

A client of many threads shares its reads, see client/reader.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import redis

from quire.keys import Keys
from quire.queue.publish.output_log import MAX_ENTRIES_PER_READ, OutputRead, read_output
from quire.transport.procedure import RoundTrip, run, send
from quire.transport.retrying import Retrying


class Reader:
    """See `AsyncReader`."""

    max_entries = MAX_ENTRIES_PER_READ

    def __init__(
        self, connection: redis.Redis, keys: Keys, *, longest_block: float, retrying: Retrying
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._longest_block = longest_block
        self._retrying = retrying

    def read(self, seen: Mapping[str, int], *, timeout: float) -> dict[str, OutputRead]:
        """What is added to these logs within `timeout` seconds, after the tokens already seen."""
        block = min(timeout, self._longest_block)
        reading = read_output(self._keys, seen, count=self.max_entries, block_seconds=block)
        return run(reading, self._do)

    def close(self) -> None:
        """Does nothing: a thread that reads has its own end."""

    def _do(self, trip: RoundTrip) -> list[Any]:
        once = partial(send, self._connection, trip)
        return self._retrying(once, wait_seconds=trip.wait_seconds)
