"""A worker's `/livez`, `/readyz` and `/metrics`.

`/livez` only checks that the engine makes progress and that the other threads show signs of life.
It does not check Redis, because a short outage would restart the whole fleet. `/readyz` says
whether this worker claims requests.
"""

from typing import Any

from prometheus_client import CollectorRegistry

from service.shared.probes import ProbeServer
from service.worker.observe.vitals import Vitals


class HealthServer(ProbeServer):
    """The worker's server: `/livez`, `/readyz` and `/metrics`."""

    def __init__(
        self,
        vitals: Vitals,
        registry: CollectorRegistry,
        *,
        host: str,
        port: int,
        contact_limit_seconds: float,
    ) -> None:
        self._vitals = vitals
        self._contact_limit_seconds = contact_limit_seconds
        checks = {"/livez": self.live, "/readyz": self.ready}
        super().__init__(registry, checks, host=host, port=port)

    def live(self) -> tuple[bool, dict[str, Any]]:
        """Whether no thread hangs, and the readings behind that."""
        vitals = self._vitals
        return vitals.is_alive, {
            "state": vitals.state,
            "overdue": [silence.thread for silence in vitals.overdue],
            "busy": vitals.is_busy,
            "stalled": vitals.is_stalled,
            "seconds_since_turn": round(vitals.seconds_since_pass, 3),
            "seconds_since_progress": round(vitals.seconds_since_progress, 3),
            "stall_timeout_seconds": vitals.stall_timeout_seconds,
        }

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Whether this worker claims requests, and the readings behind that."""
        contact = self._vitals.seconds_since_contact
        is_ready = self._vitals.is_ready(contact_limit_seconds=self._contact_limit_seconds)
        return is_ready, {
            "state": self._vitals.state,
            "alive": self._vitals.is_alive,
            "seconds_since_redis_answered": None if contact is None else round(contact, 3),
            "contact_limit_seconds": self._contact_limit_seconds,
        }
