"""A circuit breaker per endpoint: an endpoint that fails again and again is left alone for a while.

Knows no clock but the one it is given. Each process has its own circuits: they save attempts, and
lose nothing when they are forgotten.
"""

from collections.abc import Callable
from dataclasses import dataclass

#: So many failures in a row open a circuit.
FAILURES = 5

#: How long an open circuit lets nothing through; then one attempt decides.
OPEN_SECONDS = 60.0


@dataclass(slots=True)
class _Circuit:
    failures: int = 0
    closed_at: float = 0.0


class Circuits:
    """The circuits of all endpoints, by tenant."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._circuits: dict[str, _Circuit] = {}

    @property
    def num_open(self) -> int:
        """How many endpoints are left alone now. May be called from another thread."""
        return sum(circuit.failures >= FAILURES for circuit in [*self._circuits.values()])

    def pause_of(self, tenant: str) -> float:
        """Seconds until an attempt may be made; 0 for now.

        When the pause of an open circuit is over, the first caller may try, and others wait.
        """
        circuit = self._circuits.get(tenant)
        if circuit is None or circuit.failures < FAILURES:
            return 0.0
        left = circuit.closed_at - self._clock()
        if left > 0:
            return left
        circuit.closed_at = self._clock() + OPEN_SECONDS
        return 0.0

    def succeeded(self, tenant: str) -> None:
        """The endpoint has taken a webhook."""
        self._circuits.pop(tenant, None)

    def failed(self, tenant: str) -> bool:
        """The endpoint has not taken a webhook. Returns whether this opened the circuit."""
        circuit = self._circuits.setdefault(tenant, _Circuit())
        circuit.failures += 1
        if circuit.failures >= FAILURES:
            circuit.closed_at = self._clock() + OPEN_SECONDS
        return circuit.failures == FAILURES
