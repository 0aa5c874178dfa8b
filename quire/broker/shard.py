"""What the sides of a Broker share: one queue shard, and how it is reached."""

from __future__ import annotations

import redis

from quire.broker.ingress import IngressReader
from quire.keys import Keys
from quire.transitions.commits import CommitCalls
from quire.transitions.replies import ms_of
from quire.transport.connection import Retrying
from quire.transport.durability import Durability
from quire.transport.script_runner import ScriptRunner


class Shard:
    """The base of the sides; `Broker` sets it up."""

    keys: Keys
    lease_seconds: float
    _connection: redis.Redis
    _retrying: Retrying
    _scripts: ScriptRunner
    _commit_calls: CommitCalls
    _ingress: IngressReader
    _durability: Durability | None
    _longest_block: float

    def now_ms(self) -> int:
        """The broker's clock in unix milliseconds: the one deadlines are measured on."""
        return ms_of(self._retrying(self._connection.time))
