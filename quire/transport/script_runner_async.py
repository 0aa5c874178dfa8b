"""Runs Lua transitions by hash; loads them again if the server lost them.

Every transition is idempotent, so a call whose reply was lost is repeated (see `AsyncRetrying`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import redis.asyncio
from redis.exceptions import NoScriptError, ResponseError

from quire.transport.procedure import RoundTrip, run_async, send_async
from quire.transport.retrying_async import AsyncRetrying
from quire.transport.script_calls import (
    Argument,
    ScriptArguments,
    ScriptCall,
    arguments_of,
    is_lasting,
    of_its_kind,
    or_error,
    pipelines_of,
    script_error,
    script_sha,
    sending,
)

if TYPE_CHECKING:
    from quire.transport.durability import DurabilityRules


class AsyncScriptRunner:
    """Runs transitions on one server. The arguments of each call begin with `settings`.

    `load` returns the source of a transition by its name.
    """

    def __init__(
        self,
        connection: redis.asyncio.Redis,
        settings: Sequence[Argument],
        *,
        load: Callable[[str], str],
        retrying: AsyncRetrying,
    ) -> None:
        self._connection = connection
        self._settings = tuple(settings)
        self._retrying = retrying
        self._load = load

    async def run(self, name: str, call: ScriptCall) -> Any:
        """Runs one transition and returns its reply.

        BrokerUnavailable, QueueFull, or ProtocolError, see `script_error`.
        """
        source = self._load(name)
        num_keys, values = arguments_of(call, self._settings)

        async def once() -> Any:
            try:
                return await self._connection.evalsha(script_sha(source), num_keys, *values)
            except NoScriptError:
                return await self._connection.eval(source, num_keys, *values)

        async def judged() -> Any:
            try:
                return await once()
            except ResponseError as error:
                if is_lasting(error):
                    raise script_error(error) from error
                raise of_its_kind(error) from None

        return await self._retrying(judged)

    async def run_many(
        self, name: str, calls: Iterable[ScriptCall], *, durability: DurabilityRules | None = None
    ) -> list[Any]:
        """Runs many calls in few round trips. Each is atomic; all of them together are not.

        If a call fails alone, its QuireError is in the list. With `durability` it returns when all
        is on disk, or raises DurabilityUnavailable before anything is sent.
        """
        if durability:
            await self._retrying(lambda: run_async(durability.probing(), self._send))
        replies: list[Any] = []
        for part in pipelines_of(calls):
            made = [arguments_of(call, self._settings) for call in part]
            replies += await self._retrying(partial(self._pipeline, name, made, durability))
        return [or_error(reply) for reply in replies]

    @staticmethod
    async def run_together(
        name: str, calls: Sequence[tuple[AsyncScriptRunner, ScriptCall]]
    ) -> list[Any]:
        """Runs one call for each of several shards of one server, in one round trip.

        If a call fails alone, its QuireError is in the list. Repeats nothing: BrokerUnavailable if
        not all were answered, for instance because a shard is at another node meanwhile.
        """
        first = calls[0][0]
        made = [arguments_of(call, runner._settings) for runner, call in calls]
        once = partial(first._pipeline, name, made, None)
        return [or_error(reply) for reply in await first._retrying(once, repeatable=False)]

    async def _pipeline(
        self, name: str, made: Sequence[ScriptArguments], durability: DurabilityRules | None
    ) -> list[Any]:
        source = self._load(name)
        return await run_async(sending(source, made, durability), self._send)

    async def _send(self, trip: RoundTrip) -> list[Any]:
        return await send_async(self._connection, trip)
