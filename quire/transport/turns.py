"""Time slices for long work in an event loop, so that other tasks run in between.

async with Turn() as turn:
    for item in many:
        work(item)
        if turn.is_over:
            await turn.next()
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from weakref import WeakKeyDictionary

#: How long a turn lasts. A step of the work that takes longer is not interrupted.
TURN_SECONDS = 0.002

#: One lock for each loop; the work that holds it has the turn.
_locks = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()


class Turn:
    """The turns of one long work; the first begins now.

    If several long works run in a loop, only one of them gets a turn per round of the loop. So a
    round takes the time of one turn, however many long works there are.
    """

    def __init__(self) -> None:
        self._end = time.monotonic() + TURN_SECONDS
        self._lock = _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        self._has_lock = False

    async def __aenter__(self) -> Turn:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._give_back()

    @property
    def is_over(self) -> bool:
        """Whether other tasks should run now."""
        return time.monotonic() >= self._end

    async def next(self) -> None:
        """Lets all other tasks run, and then the long works that have waited longer."""
        # Keep the lock meanwhile; otherwise several long works would get a turn in this round.
        await asyncio.sleep(0)
        self._give_back()
        await self._lock.acquire()
        self._has_lock = True
        self._end = time.monotonic() + TURN_SECONDS

    def _give_back(self) -> None:
        if self._has_lock:
            self._has_lock = False
            self._lock.release()
