"""A broker whose blocking reads share one connection, to follow many logs in many threads.

    quire = Client(SharedReadsBroker(connect(url)))

A thousand threads may stream from it: they cost Redis a few XREADs and one connection. The event
loop's broker does the same with the same code around it, see async_reader.py.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import redis
from redis.exceptions import RedisError

from quire.broker.broker import Broker
from quire.broker.waits import (
    MAX_ENTRIES_PER_STREAM,
    RETURN_SECONDS,
    SWEEP_SECONDS,
    WAKE_EXPIRY_MS,
    Wait,
    Waits,
    each_alone,
)
from quire.errors import BrokerUnavailable, QuireError
from quire.keys import Keys
from quire.transitions.output_log import OutputRead, entries_by_stream, log_positions, logs_in
from quire.transitions.values import RequestStatus
from quire.transport.connection import MAX_BLOCK_SECONDS, Retrying, is_refused
from quire.wire.output import State

#: Most short calls of readers at a time; each takes a connection. Others wait for their turn.
MAX_CALLS = 8

#: How long the reading thread stays when nobody waits any more.
IDLE_SECONDS = 1.0


class SharedReadsBroker(Broker):
    """A Broker for many threads. One per process and queue is enough; it also works after a fork.

    Nothing is read ahead or kept for a reader that is slow to come back for more.
    """

    def __init__(self, connection: redis.Redis, **settings: Any) -> None:
        super().__init__(connection, **settings)
        self._begin()
        _BROKERS.add(self)

    def _begin(self) -> None:
        self._turns = threading.BoundedSemaphore(MAX_CALLS)
        self._reader = _Reader(
            self._connection, self.keys, retrying=self._retrying, longest_block=self._longest_block
        )

    def read_output(
        self, seen: Mapping[str, int], *, block_seconds: float | None = None
    ) -> dict[str, OutputRead]:
        """See `Broker.read_output`; a read that waits shares its XREAD with all others."""
        if block_seconds is not None and seen:
            return self._reader.read(seen, timeout=min(block_seconds, MAX_BLOCK_SECONDS))
        with self._turns:
            return super().read_output(seen)

    def status(self, request_id: str) -> RequestStatus:
        """See `Broker.status`."""
        with self._turns:
            return super().status(request_id)

    def absence(self) -> str | None:
        """See `Broker.absence`."""
        with self._turns:
            return super().absence()

    def end_overdue(self, request_ids: Sequence[str]) -> dict[str, State]:
        """See `Broker.end_overdue`: the deadlines of a thousand readers may be one."""
        with self._turns:
            return super().end_overdue(request_ids)


class _Reader:
    """The one thread that reads for all waits. It ends after IDLE_SECONDS without any."""

    def __init__(
        self, connection: redis.Redis, keys: Keys, *, retrying: Retrying, longest_block: float
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._retrying = retrying
        self._longest_block = longest_block
        self._wake_stream = keys.wake(secrets.token_hex(8))
        self._wake_position: str | bytes = "0-0"
        # Guards everything below; notified when there is something to wait for again.
        self._changed = threading.Condition()
        self._waits = Waits()
        self._is_running = False
        self._is_blocked = False

    def read(self, seen: Mapping[str, int], *, timeout: float) -> dict[str, OutputRead]:
        give_up = time.monotonic() + timeout
        news = threading.Event()
        wait = Wait(seen, news.set)
        try:
            if self._is_to_be_woken_for(wait):
                self._wake()
            news.wait(max(0.0, give_up - time.monotonic()))
        finally:
            # A signal handler may have raised out of the wait; it must not stay among the waits.
            with self._changed:
                self._waits.discard(wait)
        if wait.error is not None:
            raise wait.error
        return wait.news

    def _is_to_be_woken_for(self, wait: Wait) -> bool:
        """Adds a wait; True if the reading thread is blocked in a read without it."""
        with self._changed:
            self._waits.add(wait)
            if not self._is_running:
                threading.Thread(target=self._run, name="quire-reader", daemon=True).start()
                # Only now: starting may fail, and then nobody may wait for the thread.
                self._is_running = True
            self._changed.notify()
            # One wake is enough for all that come until the reader is back.
            must_wake, self._is_blocked = self._is_blocked, False
            return must_wake

    def _run(self) -> None:
        has_ended = False
        try:
            while groups := self._next_groups():
                self._read_or_fail(groups)
            has_ended = True
        finally:
            if not has_ended:
                # A bug of ours. Fail all waits, so that none is left without a thread; the next one
                # starts another. (After an orderly end another may be running already.)
                with self._changed:
                    self._is_running = False
                    self._waits.fail(BrokerUnavailable("the thread that reads has ended"))

    def _read_or_fail(self, groups: Sequence[Mapping[str, int]]) -> None:
        try:
            has_news = self._read_once(groups)
        except QuireError as error:
            with self._changed:
                self._waits.fail(error)
            has_news = True
        if has_news:
            time.sleep(RETURN_SECONDS)
        elif len(groups) > 1:
            time.sleep(SWEEP_SECONDS)

    def _next_groups(self) -> list[dict[str, int]]:
        """What to read now; empty when this thread may end."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._waits), IDLE_SECONDS):
                self._is_running = False
                return []
            groups = self._waits.groups()
            self._is_blocked = len(groups) == 1
            return groups

    def _read_once(self, groups: Sequence[Mapping[str, int]]) -> bool:
        try:
            if len(groups) == 1:
                replies = [self._block(groups[0])]
            else:
                replies = self._retrying(partial(self._sweep, groups))
        except BrokerUnavailable as error:
            if not is_refused(error):
                raise
            groups = each_alone(groups)
            replies = [self._read_alone(seen) for seen in groups]
        finally:
            with self._changed:
                self._is_blocked = False
        reads, after = dict[str, OutputRead | QuireError](), dict[str, int]()
        for seen, reply in zip(groups, replies, strict=True):
            if isinstance(reply, QuireError):
                reads |= dict.fromkeys(seen, reply)
            else:
                reads |= logs_in(reply, self._keys, seen)
            after |= seen
        with self._changed:
            self._waits.deliver(reads, after)
        return bool(reads)

    def _sweep(self, groups: Sequence[Mapping[str, int]]) -> list[Any]:
        with self._connection.pipeline(transaction=False) as pipeline:
            for seen in groups:
                pipeline.xread(log_positions(self._keys, seen), count=MAX_ENTRIES_PER_STREAM)
            return list(pipeline.execute())

    def _read_alone(self, seen: Mapping[str, int]) -> Any:
        """The reply for one log, or the error that is its own."""
        try:
            (reply,) = self._retrying(partial(self._sweep, [seen]))
        except BrokerUnavailable as error:
            if not is_refused(error):
                raise
            return error
        return reply

    def _block(self, seen: Mapping[str, int]) -> Any:
        after = log_positions(self._keys, seen)
        after[self._wake_stream] = self._wake_position
        block_ms = int(self._longest_block * 1000)
        reply: Any = self._retrying(
            lambda: self._connection.xread(after, count=MAX_ENTRIES_PER_STREAM, block=block_ms),
            wait_seconds=self._longest_block,
        )
        for stream, entries in entries_by_stream(reply):
            if stream == self._wake_stream.encode():
                self._wake_position = entries[-1][0]
        return reply

    def _wake(self) -> None:
        # Without it (no memory left, say) the new wait begins when the blocked read has ended.
        # Not a transaction: those who only submit may not open one.
        with (
            contextlib.suppress(RedisError),
            self._connection.pipeline(transaction=False) as pipeline,
        ):
            pipeline.xadd(self._wake_stream, {"more": "1"}, maxlen=1, approximate=False)
            pipeline.pexpire(self._wake_stream, WAKE_EXPIRY_MS)
            pipeline.execute()


#: All of this process.
_BROKERS = WeakSet[SharedReadsBroker]()


def _begin_anew() -> None:
    """Reset all brokers in a forked child, which has none of the parent's threads."""
    for broker in list(_BROKERS):
        broker._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
