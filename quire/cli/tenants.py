"""What `quire status` and `quire top` show of the tenants of a queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.broker.broker import Broker
from quire.broker.tenants import SharingState, TenantState, inspect_sharing, inspect_tenants
from quire.cli.console import Console

#: How many tenants of a shard are listed: those with the most open requests.
MAX_TENANTS = 20


@dataclass(frozen=True, slots=True)
class Tenants:
    """How one shard is shared, and its tenants with the most open requests."""

    sharing: SharingState
    shown: Sequence[TenantState]

    @property
    def is_interesting(self) -> bool:
        """Whether a person learns something by them: a shard without tenants has only one."""
        is_limited = any(one.tokens_per_minute is not None for one in self.shown)
        return self.sharing.by_tokens or self.sharing.num_tenants > 1 or is_limited


def look_at_tenants(brokers: Sequence[Broker]) -> list[Tenants]:
    """The tenants of each shard, in the order of the brokers. BrokerUnavailable."""
    connection = brokers[0]._connection
    shards = [broker.keys for broker in brokers]
    return [
        Tenants(sharing, inspect_tenants(connection, keys, count=MAX_TENANTS))
        for sharing, keys in zip(inspect_sharing(connection, shards), shards, strict=True)
    ]


def show_tenants(found: Sequence[Tenants], console: Console) -> None:
    """Prints them as a table, unless no shard has more than one tenant, limits or turns."""
    if not any(one.is_interesting for one in found):
        return
    for number, one in enumerate(found):
        if one.sharing.by_tokens:
            console.data(None, f"shard {number}: tenants take turns by tokens")
    console.data(None, "")
    rows = [
        (number, state.tenant, state.num_open, state.weight, state.ahead_tokens,
         _text(state.tokens_per_minute), _text(state.tokens_left))
        for number, one in enumerate(found)
        for state in one.shown
    ]  # fmt: skip
    header = ("shard", "tenant", "open", "weight", "ahead", "per_minute", "left")
    console.table(header, rows)
    left_out = sum(one.sharing.num_tenants - len(one.shown) for one in found)
    if left_out > 0:
        console.data(None, f"{left_out} more tenants with fewer open requests")


def _text(value: int | None) -> str:
    return "-" if value is None else str(value)
