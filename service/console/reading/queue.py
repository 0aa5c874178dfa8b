"""One queue: the brokers of its shards over one connection, and the state of all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import redis

from quire.broker.broker import Broker
from quire.broker.inspection import ShardState, inspect_shards
from quire.broker.tenants import SharingState, TenantState, inspect_sharing, inspect_tenants
from quire.keys import Keys
from quire.transitions.routing import shard_of
from quire.transitions.values import LAST_STATES, WorkerInfo
from quire.transport.cluster.parts import at_each_node
from quire.transport.connection import Retrying
from quire.wire.protocol import Activity, Priority

#: The most tenants of a shard that are listed: those with the most open requests.
MAX_TENANTS = 20

#: A worker that was not seen for so long is only counted.
GONE_SECONDS = 600.0

#: The prefix of the control hash's fields that ask a worker to drain.
DRAIN = "drain:"

#: How long a call of a page is retried. Short, because a person waits.
RETRY_SECONDS = 0.5


class Queue:
    """One queue. `brokers` are those of its shards, in order; all share `connection`."""

    def __init__(
        self,
        connection: redis.Redis,
        name: str,
        *,
        shards: int = 1,
        max_queue_seconds: float = 86_400.0,
        retention_seconds: float = 3600.0,
    ) -> None:
        self.name = name
        self.connection = connection
        self.brokers = [
            Broker(
                connection,
                queue=name,
                shard=shard,
                max_queue_seconds=max_queue_seconds,
                retention_seconds=retention_seconds,
                retry_seconds=RETRY_SECONDS,
            )
            for shard in range(shards)
        ]

    @property
    def keys(self) -> Sequence[Keys]:
        """The keys of the shards, in order."""
        return [broker.keys for broker in self.brokers]

    def broker_of(self, request_id: str) -> Broker:
        """The broker of the shard that a request is in."""
        return self.brokers[shard_of(request_id, len(self.brokers))]


@dataclass(frozen=True, slots=True)
class ClassState:
    """One priority class over all shards. `oldest_seconds`: the longest wait in it."""

    priority: Priority
    num_queued: int
    oldest_seconds: float


@dataclass(frozen=True, slots=True)
class ShownWorker:
    """One worker over all shards that it serves.

    `state` is the one that it signed, or `silent`. `kv_usage` is the share of its KV cache in use,
    from 0 to 1, and `generated` its tokens since its start; None for workers that do not tell.
    `activities` are its claimed requests by what they do. `is_asked`: it was asked to drain, and
    has not confirmed it yet.
    """

    name: str
    state: str
    seen_seconds: float
    model: str
    adapters: Sequence[str]
    policy: str
    num_claims: int
    activities: dict[Activity, int]
    kv_usage: float | None
    generated: int | None
    is_alive: bool
    is_asked: bool

    @property
    def can_drain(self) -> bool:
        """Whether a drain would still change something."""
        return self.is_alive and not self.is_asked and self.state != "draining"


@dataclass(frozen=True, slots=True)
class QueueState:
    """The state of a whole queue. `pause_reasons` has one for each shard, None if it runs."""

    name: str
    shards: Sequence[ShardState]
    pause_reasons: Sequence[str | None]
    asked: frozenset[str] = frozenset()
    sharing: Sequence[SharingState] = field(default_factory=tuple)
    tenants: Sequence[TenantState] = field(default_factory=tuple)

    def total(self, attribute: str) -> int:
        """The sum of a number over all shards."""
        return sum(int(getattr(shard, attribute)) for shard in self.shards)

    @property
    def is_paused(self) -> bool:
        return any(reason is not None for reason in self.pause_reasons)

    @property
    def pause_reason(self) -> str:
        """The first reason that is not empty."""
        return next((reason for reason in self.pause_reasons if reason), "")

    @property
    def oldest_seconds(self) -> float:
        """The longest wait of all classes."""
        return max(one.oldest_seconds for one in self.classes)

    @property
    def classes(self) -> Sequence[ClassState]:
        """The classes, most urgent first."""
        return [
            ClassState(
                priority,
                num_queued=sum(shard.ingress[priority].num_queued for shard in self.shards),
                oldest_seconds=max(
                    shard.ingress[priority].undelivered_seconds for shard in self.shards
                ),
            )
            for priority in reversed(Priority)
        ]

    @property
    def activities(self) -> dict[Activity, int]:
        """The claimed requests by what they do, as their workers told."""
        return {one: sum(shard.activities[one] for shard in self.shards) for one in Activity}

    @property
    def workers(self) -> Sequence[ShownWorker]:
        """The workers that were seen lately, by name."""
        found: dict[str, list[WorkerInfo]] = {}
        for shard in self.shards:
            for info in shard.workers:
                if info.seen_seconds <= GONE_SECONDS:
                    found.setdefault(info.name, []).append(info)
        return [_worker_of(found[name], self.asked) for name in sorted(found)]

    @property
    def num_gone(self) -> int:
        """The number of registered workers that are not in `workers`."""
        names = {info.name for shard in self.shards for info in shard.workers}
        return len(names) - len(self.workers)

    @property
    def num_alive(self) -> int:
        return sum(worker.is_alive for worker in self.workers)


def inspect_queue(queue: Queue) -> QueueState:
    """The state of a queue, in a few round trips. BrokerUnavailable."""
    return inspect_queues([queue])[0]


def inspect_queues(queues: Sequence[Queue]) -> list[QueueState]:
    """The states of queues that share a connection, without their tenants. BrokerUnavailable."""
    connection = queues[0].connection
    states = iter(inspect_shards(connection, [keys for queue in queues for keys in queue.keys]))
    control = iter(_control_of(connection, [keys for queue in queues for keys in queue.keys]))
    found = []
    for queue in queues:
        shards = [next(states) for _ in queue.brokers]
        words = [next(control) for _ in queue.brokers]
        asked = frozenset().union(*(word.asked for word in words))
        found.append(QueueState(queue.name, shards, [word.reason for word in words], asked))
    return found


class _Control(NamedTuple):
    """The reason of a pause, None without one, and the workers that were asked to drain."""

    reason: str | None
    asked: frozenset[str]


def _control_of(connection: redis.Redis, shards: Sequence[Keys]) -> list[_Control]:
    """What operators have set in each shard, in one round trip to each server."""

    def read(server: redis.Redis, part: Sequence[Keys]) -> list[tuple[Any, Any]]:
        with server.pipeline(transaction=False) as pipeline:
            for keys in part:
                pipeline.hget(keys.control, "paused")
                pipeline.hkeys(keys.control)
            replies = pipeline.execute()
        return list(zip(replies[::2], replies[1::2], strict=True))

    found = []
    for reason, fields in Retrying(0.0)(lambda: at_each_node(read, connection, shards)):
        names = [name.decode(errors="replace") for name in fields]
        asked = frozenset(n.removeprefix(DRAIN) for n in names if n.startswith(DRAIN))
        # Operators may write a reason with redis-cli, in the encoding of their terminal.
        found.append(_Control(None if reason is None else reason.decode(errors="replace"), asked))
    return found


def inspect_shares(queue: Queue) -> tuple[Sequence[SharingState], Sequence[TenantState]]:
    """How the shards are shared, and the tenants with the most open requests of all shards."""
    sharing = inspect_sharing(queue.connection, queue.keys)
    tenants = (inspect_tenants(queue.connection, keys, count=MAX_TENANTS) for keys in queue.keys)
    return sharing, _merged(one for shard in tenants for one in shard)


def _merged(states: Iterable[TenantState]) -> list[TenantState]:
    """One state for each tenant: open requests and tokens added up over the shards."""
    found: dict[str, TenantState] = {}
    for one in states:
        known = found.get(one.tenant)
        if known is None:
            found[one.tenant] = one
            continue
        found[one.tenant] = TenantState(
            tenant=one.tenant,
            num_open=known.num_open + one.num_open,
            weight=one.weight,
            ahead_tokens=max(known.ahead_tokens, one.ahead_tokens),
            tokens_per_minute=_sum(known.tokens_per_minute, one.tokens_per_minute),
            tokens_left=_sum(known.tokens_left, one.tokens_left),
        )
    ranked = sorted(found.values(), key=lambda one: (-one.num_open, one.tenant))
    return ranked[:MAX_TENANTS]


def _sum(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left + right


def _worker_of(infos: Sequence[WorkerInfo], asked: frozenset[str]) -> ShownWorker:
    """One worker from what it has signed in each shard."""
    last = min(infos, key=lambda info: info.seen_seconds)
    has_ended = last.state in LAST_STATES
    kv_usage, generated = last.load.get("kv_usage"), last.load.get("generated")
    return ShownWorker(
        name=last.name,
        state=last.state if last.is_alive or has_ended else "silent",
        seen_seconds=last.seen_seconds,
        model=last.model,
        adapters=sorted(last.adapters),
        policy=last.policy,
        # A worker tells each shard all its claims, and the activities of that shard.
        num_claims=int(last.load.get("claims", 0)),
        activities={one: int(sum(i.load.get(one, 0) for i in infos)) for one in Activity},
        kv_usage=None if kv_usage is None else min(1.0, max(0.0, float(kv_usage))),
        generated=None if generated is None else int(generated),
        is_alive=last.is_alive,
        is_asked=last.name in asked,
    )
