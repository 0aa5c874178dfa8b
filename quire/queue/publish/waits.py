"""Combines many waiting reads of output logs into few XREADs. Knows no connection, thread or loop.

Nothing is buffered: the log itself is the buffer. A log is read only while a reader waits for it,
so a slow reader costs nothing and delays no other.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import BrokerUnavailable, QuireError
from quire.keys import Keys
from quire.queue.publish.output_log import OutputRead, cursors_after, logs_in
from quire.queue.streams import FIRST_CURSOR, entries_by_stream
from quire.transport.connection import is_refused
from quire.transport.procedure import Procedure, RoundTrip, command

#: The most logs of one XREAD: about 60 microseconds of the server's one thread.
MAX_STREAMS_PER_READ = 256

#: The most entries of one log in one of these reads; the next read returns the rest.
MAX_ENTRIES_PER_STREAM = 128

#: The pause after a round without news, if there are more logs than one call may block on.
SWEEP_SECONDS = 0.01

#: After news, the time for readers to wait again before the next read begins without them.
RETURN_SECONDS = 0.002

#: The stream that wakes a blocked reader expires if it was not used for so long.
WAKE_EXPIRY_MS = 60_000


@dataclass(eq=False, slots=True)
class Wait:
    """One reader that waits for more than it has. `seen`: request id -> number of tokens it has.

    `wake` is called once, after `news` or `error` was set.
    """

    seen: Mapping[str, int]
    wake: Callable[[], None]
    news: dict[str, OutputRead] = field(default_factory=dict)
    error: QuireError | None = None


class Waits:
    """All waits of one process on one queue. Not safe to share without a lock."""

    def __init__(self) -> None:
        self._by_request: dict[str, list[Wait]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_request)

    def add(self, wait: Wait) -> None:
        """Adds a wait; from now on its logs are read."""
        for request_id in wait.seen:
            self._by_request.setdefault(request_id, []).append(wait)

    def discard(self, wait: Wait) -> None:
        """Removes a wait; does nothing if it was removed before."""
        for request_id in wait.seen:
            waiting = self._by_request.get(request_id, [])
            if wait in waiting:
                waiting.remove(wait)
                if not waiting:
                    del self._by_request[request_id]

    def groups(self) -> list[dict[str, int]]:
        """The logs to read: request id -> number of tokens, MAX_STREAMS_PER_READ in each group.

        If several readers wait for a log, it is read for the one with the fewest tokens.
        """
        lowest = [
            (request_id, min(wait.seen[request_id] for wait in waiting))
            for request_id, waiting in self._by_request.items()
        ]
        return [
            dict(lowest[first : first + MAX_STREAMS_PER_READ])
            for first in range(0, len(lowest), MAX_STREAMS_PER_READ)
        ]

    def deliver(
        self, reads: Mapping[str, OutputRead | QuireError], after: Mapping[str, int]
    ) -> None:
        """Hands news to the readers that wait for it, and ends their waits.

        `after` are the tokens after which each log was read. A reader with fewer tokens, which has
        begun to wait since then, continues to wait: the tokens in between were not read. A log that
        cannot be read is an error only for its own readers.
        """
        answered: dict[Wait, None] = {}
        for request_id, read in reads.items():
            for wait in self._by_request.get(request_id, ()):
                if wait.seen[request_id] < after[request_id]:
                    continue
                if isinstance(read, QuireError):
                    wait.error = _one_more(read)
                elif news := read.beyond(wait.seen[request_id]):
                    wait.news[request_id] = news
                else:
                    continue
                answered[wait] = None
        self._end(answered)

    def fail(self, error: QuireError) -> None:
        """Ends every wait with the error."""
        waits = {wait: None for waiting in self._by_request.values() for wait in waiting}
        for wait in waits:
            wait.error = _one_more(error)
        self._end(waits)

    def _end(self, waits: Mapping[Wait, None]) -> None:
        for wait in waits:
            self.discard(wait)
            wait.wake()


class WaitingReads:
    """The XREADs of one shared reader, as procedures.

    A blocked read includes a stream of the reader itself. An entry there ends the read, so that the
    next one includes new waits.
    """

    def __init__(self, keys: Keys, *, longest_block: float) -> None:
        self._keys = keys
        self._longest_block = longest_block
        self._wake_stream = keys.wake(secrets.token_hex(8))
        self._wake_cursor: bytes | str = FIRST_CURSOR

    def waking(self) -> RoundTrip:
        """Ends the blocked read."""
        # Not a transaction: a user with the rights of a producer may not use MULTI.
        return RoundTrip(
            (
                command("xadd", self._wake_stream, {"more": "1"}, maxlen=1, approximate=False),
                command("pexpire", self._wake_stream, WAKE_EXPIRY_MS),
            )
        )

    def reading(
        self, groups: Sequence[Mapping[str, int]]
    ) -> Procedure[dict[str, OutputRead | QuireError]]:
        """Reads these groups of logs, see `Waits.groups`. Waits for news only if it is one group.

        Returns the news of each log, or the error of a log that cannot be read. Raises the errors
        that are not about one log.
        """
        try:
            if len(groups) == 1:
                replies = yield from self._blocking(groups[0])
            else:
                replies = yield self._sweep(groups)
        except BrokerUnavailable as error:
            if not is_refused(error):
                raise
            # One read for each log, so that only the log that cannot be read fails.
            groups = [{request_id: seen[request_id]} for seen in groups for request_id in seen]
            replies = yield from self._alone(groups)
        reads = dict[str, OutputRead | QuireError]()
        for seen, reply in zip(groups, replies, strict=True):
            if isinstance(reply, QuireError):
                reads |= dict.fromkeys(seen, reply)
            else:
                reads |= logs_in(reply, self._keys, seen)
        return reads

    def _sweep(self, groups: Iterable[Mapping[str, int]]) -> RoundTrip:
        return RoundTrip(
            tuple(
                command("xread", cursors_after(self._keys, seen), count=MAX_ENTRIES_PER_STREAM)
                for seen in groups
            )
        )

    def _alone(self, groups: Iterable[Mapping[str, int]]) -> Procedure[list[Any]]:
        """The reply for each group, or its error, after Redis refused the joint read.

        Each group is one log. A refusal is kept as the error of its log; an outage is raised.
        """
        replies: list[Any] = []
        for seen in groups:
            try:
                replies += yield self._sweep([seen])
            except BrokerUnavailable as error:
                if not is_refused(error):
                    raise
                replies.append(error)
        return replies

    def _blocking(self, seen: Mapping[str, int]) -> Procedure[list[Any]]:
        after = cursors_after(self._keys, seen) | {self._wake_stream: self._wake_cursor}
        block_ms = int(self._longest_block * 1000)
        read = command("xread", after, count=MAX_ENTRIES_PER_STREAM, block=block_ms)
        (reply,) = yield RoundTrip((read,), wait_seconds=self._longest_block)
        for stream, entries in entries_by_stream(reply):
            if stream == self._wake_stream.encode():
                self._wake_cursor = entries[-1][0]
        return [reply]


def lowest_of(groups: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """After how many tokens each log of these groups is read."""
    return {request_id: seen for group in groups for request_id, seen in group.items()}


def _one_more(error: QuireError) -> QuireError:
    """A copy of the error, for one more reader that raises it.

    An error collects the traceback of each raise. If a thousand readers raised the same object, the
    last one would show the tracebacks of all.
    """
    own = copy.copy(error)
    own.__cause__ = error.__cause__
    return own
