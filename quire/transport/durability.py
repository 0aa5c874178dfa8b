"""Confirms a write only when it is on the server's disk.

Redis replies before it writes to disk: if it writes its log once a second and the machine fails, up
to a second of confirmed writes is lost. A durable broker prevents this for SUBMIT and the COMMIT of
an end: each is followed by WAITAOF on the same connection. A server without WAITAOF must write
every command to disk before it replies. Its settings are read after every such call, and the call
fails if they do not guarantee that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import redis
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from quire.errors import BrokerUnavailable, DurabilityUnavailable
from quire.keys import Keys
from quire.transport.connection import TRANSIENT
from quire.transport.procedure import Procedure, RoundTrip, command, run, send
from quire.transport.slots import for_key

#: How long the write to disk may take.
SYNC_SECONDS = 2.0

#: After how long the key of the marking write expires.
MARK_MS = 1000

#: The server's settings for writes to its disk.
_SETTINGS = "*append*"

_NOT_KEPT = "the server may have stopped writing to its disk before it answers"


class DurabilityRules:
    """The commands that confirm that a write is on disk, and the checks of their replies.

    Has no connection. `probing` finds out once what the server supports.
    """

    def __init__(self, keys: Keys, *, longest_seconds: float) -> None:
        self._mark = keys.mark
        self._timeout_ms = int(1000 * min(SYNC_SECONDS, longest_seconds))
        self._waits: bool | None = None

    def probing(self) -> Procedure[None]:
        """DurabilityUnavailable if the server cannot confirm that a write is on its disk."""
        if self._waits is not None:
            return
        try:
            yield RoundTrip((command("execute_command", "WAITAOF", 1, 0, self._timeout_ms),))
        except TRANSIENT:
            raise
        except RedisError as error:
            require_unknown_command(error)
        else:
            with requiring_the_mark(self._mark):
                yield RoundTrip((command("set", self._mark, "", px=MARK_MS),))
            self._waits = True
            return
        try:
            (found,) = yield RoundTrip((command("config_get", _SETTINGS),))
        except TRANSIENT:
            raise
        except RedisError:
            found = {}
        require_write_through(found)
        self._waits = False

    def add_wait(self, pipeline: Any) -> None:
        """Adds the commands that must follow the writes of a pipeline; see `check`."""
        if self._waits is None:
            return
        if not self._waits:
            # An operator may have changed the setting since the probe.
            pipeline.config_get(_SETTINGS)
            return
        # WAITAOF waits only for writes of its own connection, and a repeated call may find its work
        # done and write nothing. So the mark is written first.
        pipeline.set(self._mark, "", px=MARK_MS)
        pipeline.execute_command("WAITAOF", 1, 0, self._timeout_ms)

    def check(self, replies: list[Any]) -> None:
        """Checks the replies to these commands. BrokerUnavailable, DurabilityUnavailable."""
        if not replies:
            # Another thread has just found that the server does not support it any more.
            raise BrokerUnavailable(_NOT_KEPT)
        if len(replies) == 1:
            self._check_write_through(replies[0])
            return
        marked, synced = replies
        if isinstance(marked, RedisError):
            # Without the mark, WAITAOF may have waited for nothing.
            raise marked
        if isinstance(synced, ResponseError):
            self._waits = None
            raise DurabilityUnavailable(str(synced)) from synced
        if isinstance(synced, RedisError):
            raise synced
        if int(synced[0]) < 1:
            raise BrokerUnavailable("the write did not reach the disk in time")

    def _check_write_through(self, found: Any) -> None:
        try:
            require_write_through({} if isinstance(found, RedisError) else found)
        except DurabilityUnavailable as error:
            # It is unknown whether the write is on disk. The next call fails before it is sent.
            self._waits = None
            raise BrokerUnavailable(_NOT_KEPT) from error


class Durability(DurabilityRules):
    """The rules for one server, and a connection to it for the probe."""

    def __init__(self, connection: redis.Redis, keys: Keys, *, longest_seconds: float) -> None:
        super().__init__(keys, longest_seconds=longest_seconds)
        self._connection = for_key(connection, keys.prefix)

    def require(self) -> None:
        """DurabilityUnavailable if the server cannot confirm that a write is on its disk."""
        run(self.probing(), partial(send, self._connection))


@contextlib.contextmanager
def requiring_the_mark(mark: str) -> Iterator[None]:
    """DurabilityUnavailable if this Redis user may not write the mark: every wait would fail."""
    try:
        yield
    except NoPermissionError as error:
        right = f"(~{mark} +set)"
        raise DurabilityUnavailable(
            f"this user of Redis lacks the right {right}: a durable write is followed by a mark"
        ) from error


def require_unknown_command(error: RedisError) -> None:
    """DurabilityUnavailable for an error of WAITAOF, unless the server has no such command."""
    if "unknown command" not in str(error).lower():
        raise DurabilityUnavailable(str(error)) from error


def require_write_through(found: Mapping[Any, Any]) -> None:
    """DurabilityUnavailable unless, by these settings, the server writes every command to disk.

    The settings are empty if the server does not show them; this counts as not durable.
    """
    settings = {_text(name): _text(value) for name, value in found.items()}
    if settings.get("appendonly") != "yes" or settings.get("appendfsync") != "always":
        raise DurabilityUnavailable(
            "the server has no WAITAOF (Redis 7.2) and does not write with `appendfsync always`"
        )
    if settings.get("no-appendfsync-on-rewrite", "no") != "no":
        raise DurabilityUnavailable(
            "the server has no WAITAOF (Redis 7.2), and does not write to disk while it rewrites "
            "its log: set `no-appendfsync-on-rewrite no`"
        )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
