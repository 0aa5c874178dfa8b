"""Lets a caller hear of a write only when it is on the disk of the server.

Redis answers before it writes: a server that writes its log once a second forgets up to a second of
what it has confirmed when its machine fails. Where that must not happen, the calls that matter
(SUBMIT, and the COMMIT of an end) are followed by WAITAOF on the same connection. A server without
that command is good enough if it writes every command to disk by itself, which is asked behind
every such call, and refused otherwise: nobody shall believe in a promise that is not kept.
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

#: How long the disk may take.
SYNC_SECONDS = 2.0

#: How long the key of the marking write lives.
MARK_MS = 1000

#: The settings of a server that say when it writes to its disk.
_SETTINGS = "append*"

_NOT_KEPT = "the server may have stopped writing to its disk before it answers"


class DurabilityRules:
    """What is sent to find out whether a write is on the disk. Has no connection of its own.

    What the server can do is found out once, by `probing`.
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
        """Adds what must follow the writes of a pipeline; `check` judges the replies."""
        if self._waits is None:
            return
        if not self._waits:
            # It is a setting, and an operator may have changed it since.
            pipeline.config_get(_SETTINGS)
            return
        # A repeated call may find its work done and write nothing, and WAITAOF waits only for what
        # its own connection wrote: so something is written behind whatever there was before.
        pipeline.set(self._mark, "", px=MARK_MS)
        pipeline.execute_command("WAITAOF", 1, 0, self._timeout_ms)

    def check(self, replies: list[Any]) -> None:
        """Judges the replies to these commands. BrokerUnavailable, DurabilityUnavailable."""
        if not replies:
            # Another thread has just heard that there is no promise any more.
            raise BrokerUnavailable(_NOT_KEPT)
        if len(replies) == 1:
            self._check_write_through(replies[0])
            return
        marked, synced = replies
        if isinstance(marked, RedisError):
            # Without it nothing may have been waited for.
            raise marked
        if isinstance(synced, ResponseError):
            self._waits = None
            raise DurabilityUnavailable(str(synced)) from synced
        if isinstance(synced, RedisError):
            raise synced
        if int(synced[0]) < 1:
            raise BrokerUnavailable("what was written did not reach the disk in time")

    def _check_write_through(self, found: Any) -> None:
        try:
            require_write_through({} if isinstance(found, RedisError) else found)
        except DurabilityUnavailable as error:
            # What was written may be on disk or not; the next call is refused before it is sent.
            self._waits = None
            raise BrokerUnavailable(_NOT_KEPT) from error


class Durability(DurabilityRules):
    """The rules for one server, and a connection to it for the probe."""

    def __init__(self, connection: redis.Redis, keys: Keys, *, longest_seconds: float) -> None:
        super().__init__(keys, longest_seconds=longest_seconds)
        self._connection = connection

    def require(self) -> None:
        """DurabilityUnavailable if the server cannot confirm that a write is on its disk."""
        run(self.probing(), partial(send, self._connection))


@contextlib.contextmanager
def requiring_the_mark(mark: str) -> Iterator[None]:
    """DurabilityUnavailable where the user may not write the mark: each wait would be refused."""
    try:
        yield
    except NoPermissionError as error:
        right = f"(~{mark} +set)"
        raise DurabilityUnavailable(
            f"this user of Redis lacks the right {right}: a durable write is followed by a mark"
        ) from error


def require_unknown_command(error: RedisError) -> None:
    """DurabilityUnavailable for an answer to WAITAOF, unless the server merely lacks it."""
    if "unknown command" not in str(error).lower():
        raise DurabilityUnavailable(str(error)) from error


def require_write_through(found: Mapping[Any, Any]) -> None:
    """DurabilityUnavailable unless these settings of the server write every command to disk.

    None of them, because it may not tell or has no such command: then nothing is known, and nothing
    promised.
    """
    settings = {_text(name): _text(value) for name, value in found.items()}
    if settings.get("appendonly") != "yes" or settings.get("appendfsync") != "always":
        raise DurabilityUnavailable(
            "the server has no WAITAOF (Redis 7.2) and does not write with `appendfsync always`"
        )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
