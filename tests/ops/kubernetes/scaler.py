"""What KEDA does with a ScaledObject, for worker processes of this machine.

The formulas are those of KEDA and of the autoscaler that it drives: the largest number of all
triggers counts; a trigger is active above its activation threshold; no worker is left when no
trigger was active for the cooldown.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: A ratio so close to 1 changes nothing, as in the autoscaler.
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Trigger:
    """One trigger of a ScaledObject. `query` gives its value."""

    query: str
    threshold: float
    activation: float
    is_average: bool

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "Trigger":
        metadata = entry["metadata"]
        return cls(
            query=metadata["query"],
            threshold=float(metadata["threshold"]),
            activation=float(metadata.get("activationThreshold", 0)),
            is_average=entry.get("metricType", "AverageValue") == "AverageValue",
        )

    def wanted(self, value: float, *, now: int) -> int:
        """How many workers the value asks for while there are `now`, at least 1."""
        ratio = value / (self.threshold * (now if self.is_average else 1))
        if abs(ratio - 1) <= TOLERANCE:
            return now
        return math.ceil(value / self.threshold if self.is_average else now * ratio)


class Scaler:
    """Decides on the number of workers. `value` answers a query, `most` is the limit."""

    def __init__(
        self,
        triggers: Sequence[Trigger],
        value: Callable[[str], float],
        *,
        most: int,
        cooldown_seconds: float,
    ) -> None:
        self._triggers = triggers
        self._value = value
        self._most = most
        self._cooldown_seconds = cooldown_seconds
        self._active_at = -math.inf

    def wanted(self, now: int) -> int:
        """How many workers there should be while there are `now`."""
        values = [self._value(trigger.query) for trigger in self._triggers]
        pairs = list(zip(self._triggers, values, strict=True))
        is_active = any(value > trigger.activation for trigger, value in pairs)
        if is_active:
            self._active_at = time.monotonic()
        if now == 0:
            # KEDA starts the first one itself; the autoscaler does nothing while there is none.
            return int(is_active)
        if time.monotonic() - self._active_at >= self._cooldown_seconds:
            return 0
        return min(self._most, max(1, *(trigger.wanted(v, now=now) for trigger, v in pairs)))
