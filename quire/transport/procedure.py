"""Code that is written once for threads and for event loops, and the two ways to run it.

A procedure is a generator. It yields steps and gets back the result of each step, or the error that
the step raised. It sends nothing and never waits: `run` and `run_async` carry out the steps with
the function they are given. A RoundTrip is the step that sends commands to Redis.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis.exceptions import RedisError

from quire.errors import QuireError

_Result = TypeVar("_Result")

Procedure = Generator[Any, Any, _Result]
Command = Callable[[Any], Any]

#: What a procedure may handle. Every other error, and every cancellation, ends the procedure.
_HANDED_BACK = (QuireError, RedisError, TimeoutError)


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Commands that are sent together; the result of the step is the list of their replies.

    `wait_seconds`: for how long the server may block before it replies. With `keeps_errors` the
    reply to a command that the server refused is its error; otherwise the first error is raised.
    """

    commands: tuple[Command, ...]
    keeps_errors: bool = False
    wait_seconds: float = 0.0

    @property
    def is_single(self) -> bool:
        """Whether it is sent without a pipeline, as redis-py sends one command."""
        return len(self.commands) == 1 and not self.keeps_errors

    def add_to(self, pipeline: Any) -> None:
        """Adds the commands to a pipeline of either kind."""
        for one in self.commands:
            one(pipeline)


def command(name: str, *arguments: Any, **options: Any) -> Command:
    """A call of this method of redis-py, on a connection or a pipeline of either kind."""
    return methodcaller(name, *arguments, **options)


def send(connection: redis.Redis, trip: RoundTrip) -> list[Any]:
    """Sends the commands of one round trip and returns their replies. RedisError."""
    if trip.is_single:
        return [trip.commands[0](connection)]
    with connection.pipeline(transaction=False) as pipeline:
        trip.add_to(pipeline)
        return pipeline.execute(raise_on_error=not trip.keeps_errors)


async def send_async(connection: redis.asyncio.Redis, trip: RoundTrip) -> list[Any]:
    """See `send`."""
    if trip.is_single:
        return [await trip.commands[0](connection)]
    async with connection.pipeline(transaction=False) as pipeline:
        trip.add_to(pipeline)
        return list(await pipeline.execute(raise_on_error=not trip.keeps_errors))


def run(procedure: Procedure[_Result], do: Callable[[Any], Any]) -> _Result:
    """Runs a procedure in a thread and returns its result.

    `do` carries out one step.
    """
    reply: Any = None
    error: Exception | None = None
    while True:
        try:
            step = procedure.throw(error) if error else procedure.send(reply)
        except StopIteration as end:
            result: _Result = end.value
            return result
        finally:
            # The traceback of an error refers to this frame. Without this, the two form a cycle.
            reply = error = None
        try:
            reply = do(step)
        except _HANDED_BACK as found:
            error = found


async def run_async(procedure: Procedure[_Result], do: Callable[[Any], Awaitable[Any]]) -> _Result:
    """See `run`, in an event loop."""
    reply: Any = None
    error: Exception | None = None
    while True:
        try:
            step = procedure.throw(error) if error else procedure.send(reply)
        except StopIteration as end:
            result: _Result = end.value
            return result
        finally:
            reply = error = None
        try:
            reply = await do(step)
        except _HANDED_BACK as found:
            error = found
