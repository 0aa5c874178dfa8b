"""Cancels tasks reliably, and cancels work when its caller disconnects."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from starlette.types import Receive

#: A task that still runs this long after its cancellation is cancelled again.
INSIST_SECONDS = 0.2

_Result = TypeVar("_Result")


class HungUp(Exception):
    """The caller has disconnected, or has read nothing for too long."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`. If the caller disconnects first, `work` is cancelled; raises HungUp."""
    working, watching = asyncio.create_task(work), asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HungUp
        return working.result()
    finally:
        await end(working, watching)


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel these tasks and wait until they have ended; their results and errors are ignored.

    They are cancelled repeatedly, because one cancellation can be lost: in Python 3.11
    `asyncio.wait_for` drops it if its result arrives in the same iteration of the event loop. If
    the caller of `end` is itself cancelled meanwhile, perhaps by another `end`, CancelledError is
    raised only after all tasks have ended.
    """
    interrupted: asyncio.CancelledError | None = None
    while pending := _unended(tasks):
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=INSIST_SECONDS)
        except asyncio.CancelledError as error:
            interrupted = error
    for task in tasks:
        if not task.cancelled():
            # Without this call asyncio would warn that the exception was never retrieved.
            task.exception()
    if interrupted is not None:
        raise interrupted


def _unended(tasks: Iterable[asyncio.Future[Any]]) -> list[asyncio.Future[Any]]:
    return [task for task in tasks if not task.done()]


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
