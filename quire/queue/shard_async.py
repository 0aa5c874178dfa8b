"""How one queue shard is reached: the base class of the sides of a broker.

The commands and the meaning of their replies are procedures. This module only sends and repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import redis.asyncio

from quire.keys import Keys
from quire.queue import clock, scripts
from quire.transport.connection import longest_block_of
from quire.transport.patience import OUTAGE_RETRIES
from quire.transport.procedure import Command, Procedure, RoundTrip, run_async, send_async
from quire.transport.retrying_async import AsyncRetrying
from quire.transport.script_calls import Argument, Ask
from quire.transport.script_runner_async import AsyncScriptRunner
from quire.transport.slots import for_key, owner_of

if TYPE_CHECKING:
    from quire.transport.durability import DurabilityRules

_Result = TypeVar("_Result")


class AsyncShard:
    """The base class of the sides of a Broker.

    `settings` are the first arguments of every transition. `sources` replaces the source of a
    transition: tests use it to break one on purpose.
    """

    def __init__(
        self,
        connection: redis.asyncio.Redis,
        keys: Keys,
        *,
        settings: Sequence[Argument],
        lease_seconds: float,
        retry_seconds: float,
        durable: bool,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self.keys = keys
        self.lease_seconds = lease_seconds
        #: For how long a wait without a timeout continues while Redis does not answer.
        self.outage_seconds = OUTAGE_RETRIES * retry_seconds
        #: Reaches the node of this shard; for reads that no method has.
        self.connection = connection = for_key(connection, keys.prefix)
        self._longest_block = longest_block_of(connection)
        self._retrying = AsyncRetrying(retry_seconds, connection)
        replaced = sources or {}
        self._scripts = AsyncScriptRunner(
            connection,
            settings,
            load=lambda name: replaced.get(name) or scripts.load_source(name),
            retrying=self._retrying,
        )
        self._durability: DurabilityRules | None = None
        if durable:
            from quire.transport.durability import DurabilityRules

            self._durability = DurabilityRules(keys, longest_seconds=self._longest_block)

    @property
    def node(self) -> str:
        """`host:port` of the node of a cluster that owns this shard, as far as known.

        Empty for a single server, however it is reached.
        """
        return owner_of(self.connection)

    async def now_ms(self) -> int:
        """The broker's clock, in unix milliseconds. Deadlines are times on this clock."""
        return await self.run(clock.now_ms())

    async def run(self, procedure: Procedure[_Result]) -> _Result:
        """Runs a procedure on this shard: each step is one round trip, repeated while Redis fails.

        BrokerUnavailable, and the errors of the procedure.
        """
        return await run_async(procedure, self._do)

    async def _do(self, step: Ask | RoundTrip) -> list[Any]:
        if isinstance(step, RoundTrip):
            once = partial(send_async, self.connection, step)
            return await self._retrying(once, wait_seconds=step.wait_seconds)
        durability = self._durability if step.must_be_durable else None
        return await self._scripts.run_many(step.transition, step.calls, durability=durability)

    async def _read(self, *commands: Command) -> Any:
        """The reply to one command, or the replies to several that are sent together."""
        replies = await self._do(RoundTrip(commands))
        return replies if len(commands) > 1 else replies[0]
