"""Finds for one worker the requests that are due next, and waits for one where none waits.

It only reads: two workers may find the same request, and the claim decides. So a worker that dies
between the two loses nothing, and a read whose reply is lost is simply made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import redis
from redis.exceptions import ResponseError

from quire.keys import GROUP, Keys
from quire.transport.connection import MAX_BLOCK_SECONDS
from quire.transport.retrying import Retrying
from quire.wire.protocol import Priority


@dataclass(frozen=True, slots=True)
class Candidate:
    """A queued request that a worker may try to claim; not a right to run it.

    The lower the rank, the sooner it is due; in microseconds, see ranking.lua.
    """

    request_id: str
    priority: Priority
    rank: int


@dataclass(frozen=True, slots=True)
class Look:
    """What one round trip tells of a shard.

    `candidates`: those due first, in order. `is_paused`: then they may not be claimed. `cursors`:
    the newest entry of each stream, read before the candidates: every request that is queued after
    them adds an entry behind one of these. `is_balanced`: no stream has more entries than requests
    wait for.
    """

    candidates: list[Candidate]
    is_paused: bool
    cursors: Mapping[str, bytes]
    is_balanced: bool


class IngressReader:
    """Reads the rank sets and the ingress streams of one shard."""

    def __init__(self, connection: redis.Redis, keys: Keys, *, retrying: Retrying) -> None:
        self._connection = connection
        self._keys = keys
        self._retrying = retrying

    def ensure_groups(self) -> None:
        """Creates the streams and their group where they are missing; harmless when they are not.

        From id 0, so that requests submitted before the first worker came are counted too.
        """
        for stream in self._keys.all_ingress:
            self._retrying(partial(self._create_group, stream))

    def peek(self, *, count: int, least: Priority) -> tuple[list[Candidate], bool]:
        """The first `count` requests of class `least` or better, and whether the shard is paused.

        BrokerUnavailable is raised at once.
        """
        levels = _from(least)

        def once() -> list[Any]:
            with self._connection.pipeline(transaction=False) as pipeline:
                self._ask_heads(pipeline, levels, count=count)
                return pipeline.execute()

        replies = iter(self._retrying(once, repeatable=False))
        return self._heads_in(replies, levels, count=count)

    def look(self, *, count: int, least: Priority) -> Look:
        """The same, and what has to be known before a wait. BrokerUnavailable at once."""
        levels = _from(least)
        streams = [self._keys.ingress(level) for level in levels]

        def once() -> list[Any]:
            with self._connection.pipeline(transaction=False) as pipeline:
                for stream in streams:
                    pipeline.xrevrange(stream, count=1)
                for stream in streams:
                    pipeline.xlen(stream)
                for level in levels:
                    pipeline.zcard(self._keys.rank(level))
                self._ask_heads(pipeline, levels, count=count)
                return pipeline.execute()

        replies = iter(self._retrying(once, repeatable=False))
        newest = [next(replies) for _ in streams]
        lengths = [int(next(replies)) for _ in streams]
        waiting = [int(next(replies)) for _ in levels]
        candidates, is_paused = self._heads_in(replies, levels, count=count)
        return Look(
            candidates,
            is_paused,
            cursors={
                stream: entries[0][0] if entries else b"0-0"
                for stream, entries in zip(streams, newest, strict=True)
            },
            is_balanced=all(map(int.__le__, lengths, waiting)),
        )

    def wait(self, cursors: Mapping[str, bytes], *, seconds: float) -> None:
        """Returns when an entry was added behind these, or after `seconds`; takes nothing.

        At most MAX_BLOCK_SECONDS. BrokerUnavailable is raised at once.
        """
        block_ms = max(1, int(min(seconds, MAX_BLOCK_SECONDS) * 1000))
        after: dict[Any, Any] = dict(cursors)
        self._retrying(
            lambda: self._connection.xread(after, count=1, block=block_ms), repeatable=False
        )

    def _ask_heads(self, pipeline: Any, levels: Sequence[Priority], *, count: int) -> None:
        pipeline.hexists(self._keys.control, "paused")
        for level in levels:
            pipeline.zrange(self._keys.rank(level), 0, count - 1, withscores=True)

    def _heads_in(
        self, replies: Iterator[Any], levels: Sequence[Priority], *, count: int
    ) -> tuple[list[Candidate], bool]:
        is_paused = bool(next(replies))
        found = []
        for level in levels:
            for name, score in next(replies):
                try:
                    found.append(Candidate(name.decode(), level, int(score)))
                except UnicodeDecodeError:
                    # An id that is not UTF-8 would stay in front: no request has it.
                    self._retrying(partial(self._connection.zrem, self._keys.rank(level), name))
        found.sort(key=lambda candidate: candidate.rank)
        return found[:count], is_paused

    def _create_group(self, stream: str) -> None:
        try:
            self._connection.xgroup_create(stream, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise


def _from(least: Priority) -> list[Priority]:
    """The classes from `least` on, best first."""
    return sorted((level for level in Priority if level >= least), reverse=True)
