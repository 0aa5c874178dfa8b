"""Counts what each tenant has used, from the ends of a queue, in bounded memory and time.

Begins with the next end: a counter that began with the ends that are kept would count them again
after each start. `quire usage` counts those that are kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import redis

from quire.keys import Keys
from quire.queue.ends.telling import told
from quire.queue.streams import FIRST_CURSOR
from quire.queue.view.inspection import read_shards
from quire.records import Usage
from quire.transport.procedure import Procedure, RoundTrip, command
from service.shared.tenants import MAX_TENANTS, OTHER

#: The most reads of the ends of one shard in a scrape, of 256 ends each. More are read by the next.
MAX_READS = 64


@dataclass(slots=True)
class Used:
    """What one tenant has used since the exporter began."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, usage: Usage) -> None:
        """One more request has ended."""
        self.requests += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.output_tokens += usage.completion_tokens


@dataclass(slots=True)
class UsageCounter:
    """The usage of one queue: the first MAX_TENANTS tenants, and all others as OTHER.

    Used by one thread at a time.
    """

    connection: redis.Redis
    shards: Sequence[Keys]
    tenants: dict[str, Used] = field(default_factory=lambda: {OTHER: Used()})
    #: Shard -> the newest end that is counted.
    _cursors: dict[Keys, str] = field(default_factory=dict)

    def read(self) -> Mapping[str, Used]:
        """Counts the new ends; returns all counts by tenant. BrokerUnavailable."""
        read_shards(self._count, self.connection, self.shards)
        return self.tenants

    def _count(self, shards: Sequence[Keys]) -> Procedure[list[None]]:
        for keys in shards:
            if keys not in self._cursors:
                (newest,) = yield RoundTrip((command("xrevrange", keys.ends, count=1),))
                self._cursors[keys] = newest[0][0].decode() if newest else FIRST_CURSOR
            for _ in range(MAX_READS):
                ends = yield from told(keys, after=self._cursors[keys], block_seconds=None)
                if not ends:
                    break
                for end in ends:
                    self._used_by(end.tenant).add(end.usage)
                self._cursors[keys] = ends[-1].position
        return [None] * len(shards)

    def _used_by(self, tenant: str) -> Used:
        if tenant not in self.tenants and len(self.tenants) <= MAX_TENANTS:
            self.tenants[tenant] = Used()
        return self.tenants.get(tenant, self.tenants[OTHER])
