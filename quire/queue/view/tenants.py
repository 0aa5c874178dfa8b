"""Reads how the tenants of a queue share it: who has open requests, and who is ahead of the others.

Changes nothing. The numbers do not belong to exactly one moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.keys import Keys
from quire.queue.control.limits import backlog_of, limits_of
from quire.queue.rank.fairness import fairness_of
from quire.transport.procedure import Procedure, RoundTrip, command
from quire.wire.protocol import Priority

#: The tokens of so many microseconds may be used at once, see RATE_WINDOW_US in fairness.lua.
RATE_WINDOW_US = 60_000_000

#: A tenant counts as limited if it has less than the tokens of so many microseconds left.
LIMITED_US = 1_000_000

#: The fields of the hash of arrivals with the virtual time of each class.
_CLOCKS = [f"fair:{int(level)}" for level in Priority]


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

    def and_of(self, other: TenantState) -> TenantState:
        """The tenant over two shards."""
        return replace(
            self,
            num_open=self.num_open + other.num_open,
            ahead_tokens=max(self.ahead_tokens, other.ahead_tokens),
            tokens_per_minute=_sum(self.tokens_per_minute, other.tokens_per_minute),
            tokens_left=_sum(self.tokens_left, other.tokens_left),
        )


def _sum(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left + right


def sharing(shards: Sequence[Keys]) -> Procedure[list[SharingState]]:
    """How each shard is shared, in the given order."""
    (time,) = yield RoundTrip((command("time"),))
    used_up = _us(time) + RATE_WINDOW_US - LIMITED_US
    asked = (
        ask
        for keys in shards
        for ask in (
            command("hget", keys.control, "fairness"),
            command("hlen", keys.counts),
            command("hexists", keys.counts, "tokens"),
            command("zcount", keys.rate, used_up, "+inf"),
            command("hmget", keys.arrival, _CLOCKS),
            *(command("zrange", keys.fair(p), 0, 0, desc=True, withscores=True) for p in Priority),
        )
    )
    replies = iter((yield RoundTrip(tuple(asked))))
    return [_sharing_of(replies) for _ in shards]


def tenants(shards: Sequence[Keys], *, count: int) -> Procedure[list[list[TenantState]]]:
    """The `count` tenants of each shard with the most open requests, these first. ProtocolError."""
    found: list[list[TenantState]] = []
    for keys in shards:
        found += [(yield from _tenants(keys, count))]
    return found


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


def _tenants(keys: Keys, count: int) -> Procedure[list[TenantState]]:
    counts, control, clocks = yield RoundTrip(
        (
            command("hgetall", keys.counts),
            command("hgetall", keys.control),
            command("hmget", keys.arrival, _CLOCKS),
        )
    )
    num_open = backlog_of(counts).tenants
    fairness, limits, times = fairness_of(control), limits_of(control), _times_of(clocks)
    shown = sorted(num_open, key=lambda tenant: (-num_open[tenant], tenant))[:count]
    finishes = (
        ask
        for tenant in shown
        for ask in (
            command("zscore", keys.rate, tenant),
            *(command("zscore", keys.fair(level), f"finish:{tenant}") for level in Priority),
        )
    )
    time, *scores = yield RoundTrip((command("time"), *finishes))
    replies, now_us = iter(scores), _us(time)
    found = []
    for tenant in shown:
        used_us = max(0, int(next(replies) or 0) - now_us)
        ahead = [int(next(replies) or 0) - time for time in times]
        rate = limits.rate_of(tenant)
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


def _us(time: tuple[int, int]) -> int:
    seconds, microseconds = time
    return int(seconds) * 1_000_000 + int(microseconds)


def _times_of(clocks: Sequence[bytes | None]) -> list[int]:
    """The virtual time of each class; 0 for one that was never shared, or cannot be read."""
    words = [(clock or b"").partition(b" ")[0] for clock in clocks]
    return [int(word) if word.isdigit() else 0 for word in words]
