"""What the publisher tells of each claim that ends, for those who trace. Knows no OpenTelemetry.

`service.worker.outgoing.spans` makes OpenTelemetry spans of it.
"""

from collections.abc import Mapping
from typing import Protocol

from service.worker.outgoing.delivery import Delivery

#: Labels of an exemplar: the trace and the span that a measurement belongs to.
Exemplar = Mapping[str, str]


class Traces(Protocol):
    """Is told of each claim that ends. Any thread may call `ended`."""

    def ended(self, delivery: Delivery, outcome: str) -> Exemplar | None:
        """A claim is over, with a finish reason, `released` or `lost`. None if nobody traces it."""
        ...

    def close(self) -> None:
        """Send what has not been sent yet, for a few seconds at most; nothing follows."""
        ...


class NoTraces:
    """Nobody traces."""

    def ended(self, delivery: Delivery, outcome: str) -> Exemplar | None:  # noqa: ARG002
        """See Traces."""
        return None

    def close(self) -> None:
        """See Traces."""
