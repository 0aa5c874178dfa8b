"""What a shard takes in before it refuses, and what its limits count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.queue.rank.fairness import by_tenant
from quire.wire.codec import reading

_LIMIT_NAMES = ("requests", "tokens", "per_tenant", "rate")


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What one shard of a queue takes in before it refuses; None is no limit.

    `requests` and `tokens` limit those that wait, scheduled or queued. A request counts the tokens
    of its prompt plus the most it may generate; while no tokens wait, it is let in however many
    these are. `per_tenant` is how many requests of one tenant may be open, waiting or running;
    `tenants` has those with a limit of their own, 0 for none. `rate` is how many tokens a tenant
    may submit per minute, prompt and most tokens of the answer; unused ones are given back at the
    end. `rates` has the tenants with a rate of their own, 0 for none.
    """

    requests: int | None = None
    tokens: int | None = None
    per_tenant: int | None = None
    tenants: Mapping[str, int] = field(default_factory=dict)
    rate: int | None = None
    rates: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = (self.requests, self.tokens, self.per_tenant, self.rate)
        if any(limit is not None and limit < 1 for limit in limits):
            raise ValueError("a limit is at least 1; None is no limit")
        if any(limit < 0 for limit in (*self.tenants.values(), *self.rates.values())):
            raise ValueError("the limit of a tenant is not negative; 0 is no limit")

    def of(self, tenant: str) -> int | None:
        """How many requests of this tenant may be open; None for no limit."""
        return self.tenants.get(tenant, self.per_tenant) or None

    def rate_of(self, tenant: str) -> int | None:
        """How many tokens this tenant may submit per minute; None for no limit."""
        return self.rates.get(tenant, self.rate) or None


@dataclass(frozen=True, slots=True)
class Backlog:
    """The backlog of one shard: the tokens that wait, and the open requests of each tenant."""

    tokens: int
    tenants: Mapping[str, int] = field(default_factory=dict)


def limit_fields(limits: QueueLimits) -> dict[str, int]:
    """The fields of the control hash that hold these limits."""
    plain = {name: getattr(limits, name) for name in _LIMIT_NAMES}
    fields = {f"max_{name}": limit for name, limit in plain.items() if limit is not None}
    fields |= {f"max_of:{tenant}": limit for tenant, limit in limits.tenants.items()}
    return fields | {f"max_rate_of:{tenant}": rate for tenant, rate in limits.rates.items()}


def limits_of(fields: Mapping[bytes, bytes]) -> QueueLimits:
    """Reads the limits among the fields of the control hash. ProtocolError."""
    found = {name: fields.get(f"max_{name}".encode()) for name in _LIMIT_NAMES}
    with reading("a limit of the queue"):
        return QueueLimits(
            **{name: int(limit) for name, limit in found.items() if limit},
            tenants=by_tenant(fields, prefix=b"max_of:"),
            rates=by_tenant(fields, prefix=b"max_rate_of:"),
        )


def backlog_of(fields: Mapping[bytes, bytes]) -> Backlog:
    """Reads the counts hash. ProtocolError."""
    with reading("a count of the queue"):
        return Backlog(int(fields.get(b"tokens", 0)), by_tenant(fields, prefix=b"tenant:"))
