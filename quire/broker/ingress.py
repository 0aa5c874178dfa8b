"""Reads the ingress streams for one worker: by priority, and the entries that a crash left.

A delivery is not a claim: it only tells a worker which request to try to claim. So an entry that is
delivered twice does no harm. `recover` finds an entry whose delivery was lost.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import redis
from redis.exceptions import ResponseError

from quire.keys import GROUP, Keys
from quire.transitions.output_log import entries_by_stream
from quire.transitions.values import IngressEntry
from quire.transport.connection import MAX_BLOCK_SECONDS, Retrying
from quire.wire.protocol import Priority

#: After so many reads, one entry of another class goes first, each class in turn, so that no class
#: starves.
AGING_PERIOD = 16

#: The pause between two reads of a server that cannot block a group read.
POLL_SECONDS = 0.01

#: How long the probe for blocking reads waits for an entry that is already in the stream.
_PROBE_BLOCK_MS = 20

#: After how long the stream of a probe expires if its worker died during the probe.
_PROBE_EXPIRY_MS = 60_000

#: One script, because a worker that died between two commands would leave a stream for ever.
_MAKE_PROBE = """
redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

# What redis-py takes: stream -> the id to read after.
Streams = dict[str | bytes | memoryview, str | bytes | int | memoryview]


class IngressReader:
    """Reads one shard's ingress streams. Not thread-safe."""

    def __init__(self, connection: redis.Redis, keys: Keys, *, retrying: Retrying) -> None:
        self._connection = connection
        # In its class, a request that was requeued goes before the new ones.
        self._streams = {level: (keys.resumed(level), keys.ingress(level)) for level in Priority}
        self._priorities = {
            name.encode(): level for level, names in self._streams.items() for name in names
        }
        self._probe_key = keys.probe
        self._retrying = retrying
        # One count for each `least`. With one count for all, every turn of a low class could fall
        # on a read that does not include it.
        self._reads = dict.fromkeys(Priority, 0)
        self._can_block: bool | None = None

    def ensure_groups(self) -> None:
        """Creates the streams and their group if they are missing; otherwise does nothing.

        From id 0, so that requests submitted before the first worker started are delivered, too.
        """
        for stream in self._in_order(sorted(self._streams)):
            self._retrying(partial(self._create_group, stream))

    def read(
        self, worker: str, *, count: int, block_seconds: float, least: Priority = Priority.LOW
    ) -> list[IngressEntry]:
        """At most `count` undelivered entries of class `least` or better, best class first.

        If there are none, waits up to `block_seconds` (at most MAX_BLOCK_SECONDS) for the next one;
        if entries arrive in several streams at the same time, there may be a few more than `count`.
        BrokerUnavailable is raised without a retry: a lost reply may have delivered entries, which
        stay pending for `recover`.
        """
        self._reads[least] += 1
        entries: list[IngressEntry] = []
        classes = self._best_first(least)
        turn, rest = divmod(self._reads[least], AGING_PERIOD)
        if rest == 0:
            # Each class is first in turn; otherwise the lowest would go before the middle ones.
            rising = classes[::-1]
            first = (turn - 1) % len(rising)
            entries += self._read_first(worker, rising[first:] + rising[:first], count=1)
        if len(entries) < count:
            entries += self._read_first(worker, classes, count=count - len(entries))
        if entries or block_seconds <= 0:
            return entries
        return self._wait(worker, classes, seconds=min(block_seconds, MAX_BLOCK_SECONDS))

    def recover(
        self,
        worker: str,
        *,
        min_idle_seconds: float,
        count: int,
        least: Priority = Priority.LOW,
    ) -> list[IngressEntry]:
        """Entries of class `least` or better that were delivered but not claimed, best class first.

        At most `count` of each stream: all that are pending for `worker` itself, which must not
        read in another thread at the same time, and all that have been pending for any worker for
        `min_idle_seconds`. That time is not a lease. It only says how soon an entry is read again
        after a crash between read and claim.
        """
        found: dict[tuple[str, str], IngressEntry] = {}
        for stream in self._in_order(self._best_first(least)):
            own = self._group_read(worker, {stream: "0"}, count=count)
            others = self._claim_idle(worker, stream, int(min_idle_seconds * 1000), count)
            for entry in own + others:
                found[entry.stream, entry.entry_id] = entry
        return list(found.values())

    def _read_first(
        self, worker: str, order: Sequence[Priority], *, count: int
    ) -> list[IngressEntry]:
        # One call per stream: COUNT is per stream, and XREADGROUP has no order between streams.
        entries: list[IngressEntry] = []
        for stream in self._in_order(order):
            wanted = count - len(entries)
            if wanted <= 0:
                break
            entries += self._group_read(worker, {stream: ">"}, count=wanted)
        return entries

    def _best_first(self, least: Priority) -> list[Priority]:
        return sorted((level for level in self._streams if level >= least), reverse=True)

    def _in_order(self, order: Sequence[Priority]) -> list[str]:
        return [stream for priority in order for stream in self._streams[priority]]

    def _wait(
        self, worker: str, order: Sequence[Priority], *, seconds: float
    ) -> list[IngressEntry]:
        if self._can_block is None:
            self._can_block = self._retrying(self._probe_blocking)
        streams = dict.fromkeys(self._in_order(order), ">")
        if self._can_block:
            return self._group_read(worker, streams, count=1, block_ms=max(1, int(seconds * 1000)))
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            if entries := self._group_read(worker, streams, count=1):
                return entries
            time.sleep(POLL_SECONDS)
        return []

    def _group_read(
        self, worker: str, streams: Mapping[str, str], *, count: int, block_ms: int | None = None
    ) -> list[IngressEntry]:
        after: Streams = {stream: start for stream, start in streams.items()}  # noqa: C416

        def once() -> Any:
            return self._connection.xreadgroup(GROUP, worker, after, count=count, block=block_ms)

        # Not repeatable: a read whose reply was lost has delivered its entries.
        read = partial(self._with_groups, once, streams=streams)
        found = entries_by_stream(self._retrying(read, repeatable=False))
        return [entry for stream, part in found for entry in self._entries(stream, part)]

    def _claim_idle(
        self, worker: str, stream: str, min_idle_ms: int, count: int
    ) -> list[IngressEntry]:
        def once() -> Any:
            return self._connection.xautoclaim(stream, GROUP, worker, min_idle_ms, count=count)

        reply = self._retrying(partial(self._with_groups, once, streams=[stream]))
        return self._entries(stream.encode(), reply[1])

    def _entries(self, stream: bytes, part: Any) -> list[IngressEntry]:
        """Parses deliveries. Acknowledges and drops those whose entry was deleted meanwhile."""
        entries = []
        for item in part:
            if not item or item[0] is None:
                continue
            entry_id, fields = item
            if not fields:
                self._retrying(partial(self._connection.xack, stream, GROUP, entry_id))
                continue
            entries.append(
                IngressEntry(
                    stream=stream.decode(),
                    entry_id=entry_id.decode(),
                    # An entry that no script wrote has no id. Claiming it removes it, as any other.
                    request_id=fields.get(b"id", b"").decode(errors="replace"),
                    priority=self._priorities[stream],
                    enqueued_ms=int(entry_id.partition(b"-")[0]),
                )
            )
        return entries

    def _with_groups(self, read: Callable[[], Any], *, streams: Iterable[str]) -> Any:
        try:
            return read()
        except ResponseError:
            # After a flush or a failover the server does not have the group, and replies with one
            # of several errors (NOGROUP, UNBLOCKED). An error reply has delivered nothing, so the
            # read may be repeated. If the error has another cause, the second read raises it.
            for stream in streams:
                self._create_group(stream)
            return read()

    def _create_group(self, stream: str) -> None:
        try:
            self._connection.xgroup_create(stream, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    def _probe_blocking(self) -> bool:
        """Whether XREADGROUP BLOCK works on this server.

        An in-memory fake returns at once from an empty stream if COUNT is given, and loses entries
        if it is not. The probe detects both on a stream of its own.
        """
        # A random name; otherwise two workers that start together would read each other's entry.
        key, read = f"{self._probe_key}:{secrets.token_hex(8)}", self._connection.xreadgroup
        try:
            self._connection.eval(_MAKE_PROBE, 1, key, GROUP, _PROBE_EXPIRY_MS)
            began = time.monotonic()
            read(GROUP, "probe", {key: ">"}, count=1, block=_PROBE_BLOCK_MS)
            waited = time.monotonic() - began >= _PROBE_BLOCK_MS / 2000
            # If the server has lost the stream since, this must not create one that never expires.
            self._connection.xadd(key, {"probe": "1"}, nomkstream=True)
            return waited and bool(read(GROUP, "probe", {key: ">"}, block=_PROBE_BLOCK_MS))
        finally:
            self._connection.delete(key)
