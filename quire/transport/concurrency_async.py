"""How an event loop waits, and how it does several things at the same time.

Code that is written once for both faces imports these names from here. The generated code takes the
same names from concurrency.py, which has their forms for threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TypeVar

from quire.errors import QuireError
from quire.transport.turns import Turn

_Item = TypeVar("_Item")

#: Waits for so many seconds.
pause = asyncio.sleep

#: A lock that its holder may hold while it waits.
lock = asyncio.Lock

#: Calls a function in a thread, because it takes long.
aside = asyncio.to_thread


@asynccontextmanager
async def if_free(lock: asyncio.Lock) -> AsyncIterator[bool]:
    """A context that holds the lock if nobody else does, and tells whether. Waits for nobody."""
    if lock.locked():
        yield False
    else:
        async with lock:
            yield True


def limited(number: int) -> AbstractAsyncContextManager[object]:
    """A context in which so many tasks may be at the same time. Others wait."""
    return asyncio.Semaphore(number)


def timeout(seconds: float | None) -> AbstractAsyncContextManager[object]:
    """A context that raises TimeoutError after so many seconds; None for no limit."""
    return nullcontext() if seconds is None else asyncio.timeout(seconds)


async def heeding_cancels(awaitable: Awaitable[_Item]) -> _Item:
    """Awaits it, and raises CancelledError if it has swallowed a cancellation.

    redis-py sends with `asyncio.wait_for`. In Python 3.11 that drops a cancellation that arrives
    just when everything is sent. The cancelled task would continue, and a timeout have no effect.
    """
    task = asyncio.current_task()
    assert task is not None, "only a task can await"
    before = task.cancelling()
    try:
        return await awaitable
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


async def all_of(calls: Iterable[Awaitable[_Item]]) -> list[_Item]:
    """The results of all calls, which run at the same time. The first error ends the others."""
    waits: list[asyncio.Future[_Item]] = []
    try:
        waits += map(asyncio.ensure_future, calls)
        return [await wait for wait in waits]
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def list_of(items: Iterable[_Item]) -> list[_Item]:
    """The items as a list. Other tasks run while they are made."""
    return [item async for made in in_turns(iter(items)) for item in made]


async def in_turns(items: Iterator[_Item]) -> AsyncIterator[list[_Item]]:
    """The items, in lists of those that one turn makes. Yields the items before an error first."""
    error: QuireError | None = None
    while error is None:
        made: list[_Item] = []
        try:
            async with Turn() as turn:
                for item in items:
                    made.append(item)
                    if turn.is_over:
                        await turn.next()
                        break
        except QuireError as found:
            error = found
        if made:
            yield made
        elif error is None:
            return
    raise error
