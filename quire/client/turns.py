"""Long work in an event loop, of which the others must have their turns: it knows when one is over.

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

#: How long a turn lasts, or one step of the work that takes longer.
TURN_SECONDS = 0.002

#: Of each loop; who holds it has the turn.
_locks = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()


class Turn:
    """The turn of one work, which begins with this.

    Of all works of a loop that take more than one turn, one has the next: a loop comes round in the
    time of one turn, and not of as many as there are such works.
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
        """Whether it is time for the others."""
        return time.monotonic() >= self._end

    async def next(self) -> None:
        """Let everybody else get on, and then those who have waited for longer."""
        # Held meanwhile: given back before, it would be taken by one after the other in this round.
        await asyncio.sleep(0)
        self._give_back()
        await self._lock.acquire()
        self._has_lock = True
        self._end = time.monotonic() + TURN_SECONDS

    def _give_back(self) -> None:
        if self._has_lock:
            self._has_lock = False
            self._lock.release()
