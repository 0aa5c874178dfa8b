"""What operators have set for one shard, and the policy of its workers. Knows no Redis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.queue.control.defaults import QueueDefaults, defaults_of
from quire.queue.control.limits import QueueLimits, limits_of
from quire.queue.rank.fairness import Fairness, fairness_of
from quire.queue.rank.policy import QueuePolicy, policy_of

#: How many ends a shard keeps unless operators set another number, as in `ends.lua`.
ENDS_KEPT = 10_000

#: The prefix of the fields that ask a worker to drain.
DRAIN = "drain:"


@dataclass(frozen=True, slots=True)
class Control:
    """The control hash of one shard. Each setting is read when asked for: another may be damaged.

    ProtocolError for a limit or a weight that is no number.
    """

    fields: Mapping[bytes, bytes]

    @property
    def pause_reason(self) -> str | None:
        """The reason of the pause; None if the shard is not paused."""
        reason = self.fields.get(b"paused")
        # Operators may write it with redis-cli, in the encoding of their terminal.
        return None if reason is None else reason.decode(errors="replace")

    @property
    def drain_wishes(self) -> frozenset[str]:
        """The workers that were asked to drain and have not confirmed it yet."""
        names = (name.decode(errors="replace") for name in self.fields)
        return frozenset(name.removeprefix(DRAIN) for name in names if name.startswith(DRAIN))

    @property
    def limits(self) -> QueueLimits:
        """What the shard takes in before it refuses."""
        return limits_of(self.fields)

    @property
    def fairness(self) -> Fairness:
        """How the tenants of the shard share it."""
        return fairness_of(self.fields)

    @property
    def defaults(self) -> QueueDefaults:
        """What the shard sets for requests that do not say it themselves."""
        return defaults_of(self.fields)

    @property
    def policy(self) -> QueuePolicy | None:
        """How the requests that wait are ranked; None if no worker has announced it."""
        return policy_of(self.fields)

    @property
    def ends_kept(self) -> int:
        """About how many ends the shard keeps, as `ends.lua` reads it."""
        text = self.fields.get(b"ends", b"")
        return int(text) if text.isdigit() else ENDS_KEPT

    @property
    def prompts_kept(self) -> int:
        """The most bytes of a request that is kept after its end; 0 keeps none."""
        text = self.fields.get(b"keep_prompts", b"")
        return int(text) if text.isdigit() else 0

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants with a setting of their own."""
        limits = self.limits
        return frozenset({*limits.tenants, *limits.rates, *self.fairness.weights})

    def is_like(self, other: Control) -> bool:
        """Whether the other shard has the same settings; a pause and drains do not count."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("limits", "fairness", "defaults", "ends_kept", "prompts_kept")
        )
