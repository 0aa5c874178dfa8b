"""The steps of handles and clients, and how a thread and an event loop carry them out.

Their procedures (see quire/transport/procedure.py) call the methods that Broker and AsyncBroker
have in common.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.client.turns import Turn
from quire.errors import QuireError
from quire.queue.async_broker import AsyncBroker
from quire.queue.broker import Broker
from quire.transport.procedure import run, run_async

_Item = TypeVar("_Item")

AnyBroker = Broker | AsyncBroker


@dataclass(frozen=True, slots=True)
class BrokerCall:
    """Calls a method of a broker, or runs a procedure of such steps; the reply is its result.

    An event loop stops waiting after `longest_seconds`; a thread cannot.
    """

    method: Callable[[], Any]
    longest_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Waits."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Collect:
    """Makes a list of the items. An event loop runs other tasks in between."""

    items: Iterator[Any]


Step = BrokerCall | Pause | Collect


def in_thread(step: Step) -> Any:
    """Carries out one step and returns its result."""
    if isinstance(step, BrokerCall):
        result = step.method()
        return run(result, in_thread) if isinstance(result, Generator) else result
    if isinstance(step, Collect):
        return list(step.items)
    return time.sleep(step.seconds)


async def in_loop(step: Step) -> Any:
    """See `in_thread`. TimeoutError if a call takes longer than its `longest_seconds`."""
    if isinstance(step, BrokerCall):
        async with asyncio.timeout(step.longest_seconds):
            result = step.method()
            return await (run_async(result, in_loop) if isinstance(result, Generator) else result)
    if isinstance(step, Collect):
        return [item async for items in in_turns(step.items) for item in items]
    return await asyncio.sleep(step.seconds)


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
