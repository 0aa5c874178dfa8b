"""Reads how the tenants of a queue share it: who has open requests, and who is ahead of the others.

Changes nothing. The numbers do not belong to exactly one moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from quire.keys import Keys
from quire.transitions.replies import backlog_of, fairness_of, limits_of
from quire.transport.cluster.connection import for_key
from quire.transport.cluster.parts import at_each_node
from quire.transport.connection import Retrying
from quire.wire.protocol import Priority

#: The tokens of so many microseconds may be used at once, see RATE_WINDOW_US in fairness.lua.
RATE_WINDOW_US = 60_000_000

#: A tenant counts as limited if it has less than the tokens of so many microseconds left.
LIMITED_US = 1_000_000


@dataclass(frozen=True, slots=True)
class SharingState:
    """How one shard is shared.

    `by_tokens`: its tenants take turns by tokens. `num_tenants` have open requests. `num_limited`
    have used up their tokens per minute, but for a second of them. `ahead_tokens` by class: how
    many tokens, divided by its weight, the tenant that is furthest ahead of the virtual time of
    the class is ahead of it.
    """

    by_tokens: bool
    num_tenants: int
    num_limited: int
    ahead_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TenantState:
    """One tenant of a shard.

    `ahead_tokens`: how far it is ahead of the virtual time of its class, in tokens divided by
    `weight`; the most of its classes. `tokens_per_minute` is its limit, of which it may use
    `tokens_left` now; both are None without a limit.
    """

    tenant: str
    num_open: int
    weight: int
    ahead_tokens: int
    tokens_per_minute: int | None
    tokens_left: int | None


def inspect_sharing(connection: redis.Redis, shards: Sequence[Keys]) -> list[SharingState]:
    """How each shard is shared, in the given order. Does not retry. BrokerUnavailable."""
    return Retrying(0.0)(lambda: at_each_node(_inspect_sharing, connection, shards))


def inspect_tenants(connection: redis.Redis, keys: Keys, *, count: int) -> list[TenantState]:
    """The `count` tenants of a shard with the most open requests, these first.

    Does not retry. BrokerUnavailable, ProtocolError.
    """
    connection = for_key(connection, keys.prefix)
    return Retrying(0.0)(lambda: _inspect_tenants(connection, keys, count))


def _inspect_sharing(connection: redis.Redis, shards: Sequence[Keys]) -> list[SharingState]:
    now_us = _now_us(connection)
    with connection.pipeline(transaction=False) as pipeline:
        for keys in shards:
            pipeline.hget(keys.control, "fairness")
            pipeline.hlen(keys.counts)
            pipeline.hexists(keys.counts, "tokens")
            pipeline.zcount(keys.rate, now_us + RATE_WINDOW_US - LIMITED_US, "+inf")
            pipeline.hmget(keys.arrival, _clock_fields())
            for level in Priority:
                pipeline.zrange(keys.fair(level), 0, 0, desc=True, withscores=True)
        replies = iter(pipeline.execute())
    return [_sharing_of(replies) for _ in shards]


def _sharing_of(replies: Iterator[Any]) -> SharingState:
    by_tokens = next(replies) == b"tokens"
    num_tenants = int(next(replies)) - int(next(replies))
    num_limited = int(next(replies))
    times = _times_of(next(replies))
    furthest = [next(replies) for _ in Priority]
    return SharingState(
        by_tokens=by_tokens,
        num_tenants=num_tenants,
        num_limited=num_limited,
        ahead_tokens=tuple(
            max(0, int(rows[0][1]) - time) if rows else 0
            for rows, time in zip(furthest, times, strict=True)
        ),
    )


def _inspect_tenants(connection: redis.Redis, keys: Keys, count: int) -> list[TenantState]:
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.hgetall(keys.counts)
        pipeline.hgetall(keys.control)
        pipeline.hmget(keys.arrival, _clock_fields())
        counts, control, clocks = pipeline.execute()
    num_open = backlog_of(counts).tenants
    fairness, limits, times = fairness_of(control), limits_of(control), _times_of(clocks)
    shown = sorted(num_open, key=lambda tenant: (-num_open[tenant], tenant))[:count]
    now_us = _now_us(connection)
    with connection.pipeline(transaction=False) as pipeline:
        for tenant in shown:
            pipeline.zscore(keys.rate, tenant)
            for level in Priority:
                pipeline.zscore(keys.fair(level), f"finish:{tenant}")
        replies = iter(pipeline.execute())
    found = []
    for tenant in shown:
        used_us = max(0, int(next(replies) or 0) - now_us)
        ahead = [int(next(replies) or 0) - time for time in times]
        rate = limits.rates.get(tenant, limits.rate) or None
        left = None if rate is None else max(0, RATE_WINDOW_US - used_us) * rate // RATE_WINDOW_US
        found.append(
            TenantState(
                tenant=tenant,
                num_open=num_open[tenant],
                weight=fairness.weights.get(tenant, 1),
                ahead_tokens=max(0, *ahead),
                tokens_per_minute=rate,
                tokens_left=left,
            )
        )
    return found


def _now_us(connection: redis.Redis) -> int:
    seconds, microseconds = connection.time()
    return int(seconds) * 1_000_000 + int(microseconds)


def _clock_fields() -> list[str]:
    return [f"fair:{int(level)}" for level in Priority]


def _times_of(clocks: Sequence[bytes | None]) -> list[int]:
    """The virtual time of each class; 0 for one that was never shared, or cannot be read."""
    words = [(clock or b"").partition(b" ")[0] for clock in clocks]
    return [int(word) if word.isdigit() else 0 for word in words]
