"""How the tenants of a queue share it, as operators set it. Knows no Redis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: The largest weight of a tenant.
MAX_WEIGHT = 1000


@dataclass(frozen=True, slots=True)
class Fairness:
    """How the tenants of a shard share it.

    `by_tokens`: inside a class, tenants take turns by the tokens of their requests. Otherwise only
    the policy counts. A tenant of weight 2 gets twice the tokens of one of weight 1, which is that
    of all tenants that `weights` does not name.
    """

    by_tokens: bool = False
    weights: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(not 1 <= weight <= MAX_WEIGHT for weight in self.weights.values()):
            raise ValueError(f"a weight is from 1 to {MAX_WEIGHT}")
