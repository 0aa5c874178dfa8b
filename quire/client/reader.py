"""A broker whose waiting reads share one connection, to follow many logs in many threads.

    from quire import Client, SharedReadsBroker, connect

    client = Client(SharedReadsBroker(connect(url)))

A thousand threads that stream from it cost Redis a few XREADs and one connection. AsyncBroker does
the same for an event loop, see reader_async.py.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import redis
from redis.exceptions import RedisError

from quire.errors import BrokerUnavailable, QuireError
from quire.keys import Keys
from quire.queue.broker import Broker
from quire.queue.publish.output_log import OutputRead
from quire.queue.publish.waits import (
    RETURN_SECONDS,
    SWEEP_SECONDS,
    Wait,
    WaitingReads,
    Waits,
    lowest_of,
)
from quire.queue.reader import Reader
from quire.transport.procedure import run, send
from quire.transport.retrying import MAX_CALLS, Retrying
from quire.wire.output import State

#: After how long without a wait the reading thread ends.
IDLE_SECONDS = 1.0


class SharedReadsBroker(Broker):
    """A Broker for many threads. One per process and queue is enough; it also works after a fork.

    Nothing is read ahead or buffered for a slow reader.
    """

    def __init__(self, connection: redis.Redis, **settings: Any) -> None:
        super().__init__(connection, **settings)
        self._begin()
        _BROKERS.add(self)

    def _begin(self) -> None:
        seconds = self._retrying.seconds
        # Short reads take turns, or a thousand threads would open as many connections. Scripts have
        # their own Retrying: a submit waits for no reader, and the reading thread for nobody.
        self._retrying = Retrying(seconds, self.connection)
        self._retrying.turns = threading.BoundedSemaphore(MAX_CALLS)
        self._reader = _Reader(
            self.connection,
            self.keys,
            longest_block=self._longest_block,
            retrying=Retrying(seconds, self.connection),
        )

    def end_overdue(self, request_ids: Sequence[str]) -> dict[str, State]:
        """See `Producer.end_overdue`. Takes turns: many readers may call it at once."""
        with self._retrying.turns:
            return super().end_overdue(request_ids)


class _Reader(Reader):
    """The one thread that reads for all waits. It ends after IDLE_SECONDS without a wait."""

    def __init__(
        self, connection: redis.Redis, keys: Keys, *, longest_block: float, retrying: Retrying
    ) -> None:
        super().__init__(connection, keys, longest_block=longest_block, retrying=retrying)
        self._reads = WaitingReads(keys, longest_block=longest_block)
        # Guards all attributes below; notified when a wait is added.
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
            # A signal handler may have raised during the wait; then the wait must be removed, too.
            with self._changed:
                self._waits.discard(wait)
        if wait.error is not None:
            raise wait.error
        return wait.news

    def _is_to_be_woken_for(self, wait: Wait) -> bool:
        """Adds a wait. True if the reading thread is blocked in a read without it."""
        with self._changed:
            self._waits.add(wait)
            if not self._is_running:
                threading.Thread(target=self._run, name="quire-reader", daemon=True).start()
                # Set after the start: if the start fails, the next wait must try again.
                self._is_running = True
            self._changed.notify()
            # One wake is enough for all waits that are added until the reader returns.
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
                # A bug in this class. Fail all waits, because their thread has ended; the next wait
                # starts another. (After a normal end, another thread may be running already.)
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
            reads = run(self._reads.reading(groups), self._do)
        finally:
            with self._changed:
                self._is_blocked = False
        with self._changed:
            self._waits.deliver(reads, lowest_of(groups))
        return bool(reads)

    def _wake(self) -> None:
        # If this fails (no memory, for example), the new wait begins after the blocked read.
        with contextlib.suppress(RedisError):
            send(self._connection, self._reads.waking())


#: All brokers of this process, for `_begin_anew`.
_BROKERS = WeakSet[SharedReadsBroker]()


def _begin_anew() -> None:
    """Resets all brokers in a forked child, which has none of the parent's threads."""
    for broker in list(_BROKERS):
        broker._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
