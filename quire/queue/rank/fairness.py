"""How the tenants of a queue share it, as operators set it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.wire.codec import reading

#: The value of the field `fairness` while tenants share a queue by tokens.
BY_TOKENS = "tokens"

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


def fairness_fields(fairness: Fairness) -> dict[str, str]:
    """The fields of the control hash that hold this."""
    fields = {"fairness": BY_TOKENS} if fairness.by_tokens else {}
    return fields | {f"weight:{name}": str(one) for name, one in fairness.weights.items()}


def fairness_of(fields: Mapping[bytes, bytes]) -> Fairness:
    """Reads the fairness among the fields of the control hash. ProtocolError."""
    with reading("the fairness of the queue"):
        by_tokens = fields.get(b"fairness", b"").decode() == BY_TOKENS
        return Fairness(by_tokens, by_tenant(fields, prefix=b"weight:"))


def by_tenant(fields: Mapping[bytes, bytes], *, prefix: bytes) -> dict[str, int]:
    """The numbers of tenants: those of the fields that begin so. ValueError."""
    return {
        name.removeprefix(prefix).decode(): int(value)
        for name, value in fields.items()
        if name.startswith(prefix)
    }
