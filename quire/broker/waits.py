"""Puts many waiting reads of output logs into few XREADs; knows no connection, thread or loop.

Nothing is buffered: the log itself is the buffer. A reader that has not come back for more is not
read for, so a slow one costs nothing and holds up nobody.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from quire.errors import QuireError
from quire.transitions.output_log import OutputRead

#: The most logs of one XREAD: some 60 microseconds of the server's one thread.
MAX_STREAMS_PER_READ = 256

#: The most entries of one log that one of these reads takes; the rest comes with the next.
MAX_ENTRIES_PER_STREAM = 128

#: With more logs than one call may block on, how long to wait after a round without news.
SWEEP_SECONDS = 0.01

#: After news, how long readers have to come back for more before the next read begins without them.
RETURN_SECONDS = 0.002

#: The stream that wakes a blocked reader is forgotten when it was not used for so long.
WAKE_EXPIRY_MS = 60_000


@dataclass(eq=False, slots=True)
class Wait:
    """One reader that waits for news beyond what it has: request id -> tokens.

    `wake` is called once, when `news` or `error` has been set.
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
        """From now on the logs of this wait are read."""
        for request_id in wait.seen:
            self._by_request.setdefault(request_id, []).append(wait)

    def discard(self, wait: Wait) -> None:
        """This wait is over; harmless when it is already."""
        for request_id in wait.seen:
            waiting = self._by_request.get(request_id, [])
            if wait in waiting:
                waiting.remove(wait)
                if not waiting:
                    del self._by_request[request_id]

    def groups(self) -> list[dict[str, int]]:
        """What to read, at most MAX_STREAMS_PER_READ logs in each group.

        A log that several wait for is read for the one who has least of it.
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
        """Hands the news to those who wait for it, and ends their waits.

        `after` are the tokens behind which each log was read. Who has come since then, and has
        fewer, waits on: what lies between was not read. A log that cannot be read is an error for
        its own readers only.
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


def each_alone(groups: Iterable[Mapping[str, int]]) -> list[dict[str, int]]:
    """The same logs, each in a group of its own: who of them made a read fail, fails alone then."""
    return [{request_id: seen} for group in groups for request_id, seen in group.items()]


def _one_more(error: QuireError) -> QuireError:
    """The same error for one more who raises it.

    An error keeps the traceback of everyone who has raised it: shared by a thousand readers, it
    would tell the last of them the way of all others.
    """
    own = copy.copy(error)
    own.__cause__ = error.__cause__
    return own
