"""What a queue accepts, how its tenants share it, and how much of that is used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.broker.telling import ENDS_KEPT
from quire.transitions.defaults import QueueDefaults, defaults_of
from quire.transitions.fairness import Fairness
from quire.transitions.replies import backlog_of, fairness_of, limits_of
from quire.transitions.values import Backlog, QueueLimits
from quire.transport.procedure import Procedure, RoundTrip, command
from service.console.reading.queue import Queue

#: The most tenants that are listed: those with settings of their own, then those with the most open
#: requests.
MAX_TENANTS = 100


@dataclass(frozen=True, slots=True)
class ShardLimits:
    """What is set for one shard, and what its backlog is."""

    limits: QueueLimits
    fairness: Fairness
    defaults: QueueDefaults
    backlog: Backlog
    ends: int

    @property
    def settings(self) -> tuple[Any, ...]:
        """What operators have set, without what is used."""
        return self.limits, self.fairness, self.defaults, self.ends


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """One tenant over all shards. None where it has no setting of its own."""

    tenant: str
    num_open: int
    limit: int | None
    rate: int | None
    weight: int | None


@dataclass(frozen=True, slots=True)
class LimitsState:
    """The limits of a queue: those of its first shard, which the others should have too."""

    shards: Sequence[ShardLimits]
    tenants: Sequence[TenantLimits]
    num_tenants: int

    @property
    def first(self) -> ShardLimits:
        return self.shards[0]

    @property
    def do_differ(self) -> bool:
        """Whether another shard has other settings."""
        return any(shard.settings != self.first.settings for shard in self.shards)

    @property
    def waiting_tokens(self) -> int:
        return sum(shard.backlog.tokens for shard in self.shards)


def limits_state(queue: Queue) -> LimitsState:
    """The limits of a queue, in one round trip. BrokerUnavailable, ProtocolError."""
    return queue.brokers[0].run(_read(queue))


def _read(queue: Queue) -> Procedure[LimitsState]:
    replies = yield RoundTrip(
        tuple(command("hgetall", key) for keys in queue.keys for key in (keys.control, keys.counts))
    )
    shards = [
        _shard(control, counts) for control, counts in zip(replies[::2], replies[1::2], strict=True)
    ]
    num_open: dict[str, int] = {}
    for shard in shards:
        for tenant, number in shard.backlog.tenants.items():
            num_open[tenant] = num_open.get(tenant, 0) + number
    first = shards[0]
    own = {*first.limits.tenants, *first.limits.rates, *first.fairness.weights}
    ranked = sorted({*num_open, *own}, key=lambda name: (name not in own, -num_open.get(name, 0)))
    tenants = [
        TenantLimits(
            tenant,
            num_open.get(tenant, 0),
            first.limits.tenants.get(tenant),
            first.limits.rates.get(tenant),
            first.fairness.weights.get(tenant),
        )
        for tenant in ranked[:MAX_TENANTS]
    ]
    return LimitsState(shards, tenants, len(ranked))


def _shard(control: Mapping[bytes, bytes], counts: Mapping[bytes, bytes]) -> ShardLimits:
    ends = control.get(b"ends", b"")
    return ShardLimits(
        limits=limits_of(control),
        fairness=fairness_of(control),
        defaults=defaults_of(control),
        backlog=backlog_of(counts),
        ends=int(ends) if ends.isdigit() else ENDS_KEPT,
    )
