"""One view of a queue over all its shards, which the command, the console and the exporter print.

A reader asks for the parts that it prints. What several shards say of one thing is put together
here: counts are added up, of waits the longest counts, of a worker its newest word, and of settings
those of the first shard, which the others should have too. Changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import redis

from quire.keys import Keys
from quire.queue.clock import ms_of
from quire.queue.control.control import Control
from quire.queue.control.limits import Backlog, backlog_of
from quire.queue.rank.policy import QueuePolicy
from quire.queue.view.inspection import IngressState, ShardState, read_shards, states
from quire.queue.view.tenants import SharingState, TenantState, sharing, tenants
from quire.queue.workers.workers import WorkerInfo, in_all_shards
from quire.transport.procedure import Procedure, RoundTrip, command
from quire.wire.protocol import Activity, Priority

#: The most tenants of a shard that are read: those with the most open requests.
MAX_TENANTS = 20


class Part(StrEnum):
    """What is read of each shard: the fields of QueueView."""

    SHARDS = "shards"
    CONTROL = "control"
    SHARING = "sharing"
    TENANTS = "tenants"
    BACKLOG = "backlog"
    BATCHES = "batches"


class BatchCounts(NamedTuple):
    """How many batches have not ended, and how many of them nobody holds."""

    open: int
    free: int


@dataclass(frozen=True, slots=True)
class QueueView:
    """A queue. Each part has what was read of each shard, in order; it is empty if nobody asked."""

    name: str
    shards: Sequence[ShardState] = ()
    control: Sequence[Control] = ()
    sharing: Sequence[SharingState] = ()
    tenants: Sequence[Sequence[TenantState]] = ()
    backlog: Sequence[Backlog] = ()
    batches: Sequence[BatchCounts] = ()

    # Of the requests.

    def total(self, attribute: str) -> int:
        """The sum of a number of ShardState over all shards."""
        return sum(int(getattr(shard, attribute)) for shard in self.shards)

    def rest(self, attribute: str, part: str) -> int:
        """The total without a part of it."""
        # The two were read one after the other, so the part may be larger.
        return max(0, self.total(attribute) - self.total(part))

    @property
    def classes(self) -> Sequence[IngressState]:
        """The classes over all shards, the least urgent first."""
        return [_whole([shard.ingress[level] for shard in self.shards]) for level in Priority]

    @property
    def oldest_seconds(self) -> float:
        """The longest wait of all classes."""
        return max(one.undelivered_seconds for one in self.classes)

    @property
    def activities(self) -> Mapping[Activity, int]:
        """The claimed requests by what they do, as their workers told."""
        return {one: sum(shard.activities[one] for shard in self.shards) for one in Activity}

    # What operators and workers have set.

    @property
    def is_paused(self) -> bool:
        """Whether a shard is paused."""
        return any(shard.is_paused for shard in self.shards)

    @property
    def pause_reason(self) -> str:
        """The first reason of a pause that is not empty."""
        return next((one.pause_reason for one in self.control if one.pause_reason), "")

    @property
    def policy(self) -> QueuePolicy | None:
        """How the first shard ranks its requests."""
        return self.shards[0].policy

    @property
    def settings(self) -> Control:
        """The settings of the first shard."""
        return self.control[0]

    @property
    def do_settings_differ(self) -> bool:
        """Whether another shard has other settings."""
        return not all(one.is_like(self.settings) for one in self.control)

    # Of the workers.

    @property
    def words(self) -> Sequence[WorkerInfo]:
        """What each worker has signed in each of its shards."""
        return [worker for shard in self.shards for worker in shard.workers]

    @property
    def known_workers(self) -> Sequence[WorkerInfo]:
        """Every registered worker, by name: its newest word, and what it does in all shards."""
        found: dict[str, list[WorkerInfo]] = {}
        for info in self.words:
            found.setdefault(info.name, []).append(info)
        return [in_all_shards(found[name]) for name in sorted(found)]

    @property
    def workers(self) -> Sequence[WorkerInfo]:
        """The workers that were seen lately."""
        return [worker for worker in self.known_workers if not worker.is_gone]

    @property
    def num_gone(self) -> int:
        """The number of registered workers that are not in `workers`."""
        return sum(worker.is_gone for worker in self.known_workers)

    @property
    def num_alive(self) -> int:
        """The number of workers that have signed lately and not ended."""
        return sum(worker.is_alive for worker in self.known_workers)

    @property
    def asked(self) -> frozenset[str]:
        """The workers that were asked to drain and have not confirmed it yet."""
        return frozenset().union(*(one.drain_wishes for one in self.control))

    def num_ready(self, *, within: float) -> int:
        """The number of workers that some shard saw ready in so many seconds."""
        return len({w.name for w in self.words if w.is_ready and w.seen_seconds <= within})

    # Of the tenants.

    @property
    def shared(self) -> SharingState:
        """How the queue is shared; of how far a tenant is ahead the most."""
        return SharingState(
            by_tokens=any(one.by_tokens for one in self.sharing),
            num_tenants=sum(one.num_tenants for one in self.sharing),
            num_limited=sum(one.num_limited for one in self.sharing),
            ahead_tokens=tuple(max(one.ahead_tokens[p] for one in self.sharing) for p in Priority),
        )

    @property
    def busiest_tenants(self) -> Sequence[TenantState]:
        """The tenants with the most open requests over all shards."""
        found: dict[str, TenantState] = {}
        for one in (one for shard in self.tenants for one in shard):
            known = found.get(one.tenant)
            found[one.tenant] = one if known is None else known.and_of(one)
        ranked = sorted(found.values(), key=lambda one: (-one.num_open, one.tenant))
        return ranked[:MAX_TENANTS]

    @property
    def waiting_tokens(self) -> int:
        """The tokens that wait, as the limits count them."""
        return sum(one.tokens for one in self.backlog)

    @property
    def num_open(self) -> Mapping[str, int]:
        """The open requests of each tenant: those with settings, then those with the most."""
        counts = Counter(dict.fromkeys(self.settings.tenants, 0))
        for shard in self.backlog:
            counts.update(shard.tenants)
        own = self.settings.tenants
        ranked = sorted(counts, key=lambda name: (name not in own, -counts[name], name))
        return {name: counts[name] for name in ranked}


def view_queues(
    connection: redis.Redis, queues: Mapping[str, Sequence[Keys]], *parts: Part
) -> list[QueueView]:
    """Reads the given parts of all shards of each queue, in a few round trips for all queues.

    Does not retry, so that it takes no longer than the connection's timeouts. BrokerUnavailable,
    ProtocolError.
    """
    shards = [keys for of_queue in queues.values() for keys in of_queue]
    found = {part: iter(read_shards(_READS[part], connection, shards)) for part in parts}
    return [
        QueueView(name, **{part.value: [next(read) for _ in keys] for part, read in found.items()})
        for name, keys in queues.items()
    ]


def _control(shards: Sequence[Keys]) -> Procedure[list[Control]]:
    rows = yield RoundTrip(tuple(command("hgetall", keys.control) for keys in shards))
    return list(map(Control, rows))


def batches(shards: Sequence[Keys]) -> Procedure[list[BatchCounts]]:
    """The batches of each shard. All batches of a queue are in its first one."""
    (time,) = yield RoundTrip((command("time"),))
    works = [keys.batch_work for keys in shards]
    counts = yield RoundTrip(
        (
            *(command("zcard", work) for work in works),
            *(command("zcount", work, "-inf", ms_of(time)) for work in works),
        )
    )
    return list(map(BatchCounts, counts[: len(works)], counts[len(works) :]))


def _backlog(shards: Sequence[Keys]) -> Procedure[list[Backlog]]:
    rows = yield RoundTrip(tuple(command("hgetall", keys.counts) for keys in shards))
    return list(map(backlog_of, rows))


#: How each part is read of several shards.
_READS: Mapping[Part, Callable[[Sequence[Keys]], Procedure[Sequence[Any]]]] = {
    Part.SHARDS: states,
    Part.CONTROL: _control,
    Part.SHARING: sharing,
    Part.TENANTS: partial(tenants, count=MAX_TENANTS),
    Part.BACKLOG: _backlog,
    Part.BATCHES: batches,
}


def _whole(parts: Sequence[IngressState]) -> IngressState:
    """One class of several shards."""
    return IngressState(
        priority=parts[0].priority,
        num_undelivered=sum(one.num_undelivered for one in parts),
        undelivered_seconds=max(one.undelivered_seconds for one in parts),
        num_queued=sum(one.num_queued for one in parts),
    )
