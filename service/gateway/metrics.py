"""The metrics of one gateway, built from its register. All label values exist from the start."""

import itertools
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder

from service.gateway.register import gateway_families
from service.shared.instruments import build_instrument

#: The reason of a broken stream by the code of its error; every other code is a failed request.
_REASONS = {
    "broker_unavailable": "unavailable",
    "output_rewound": "rewound",
    "request_lost": "rewound",
    "gateway_draining": "draining",
}


class GatewayMetrics:
    """What a gateway counts. `num_open` is read at each scrape."""

    def __init__(self, *, num_open: Callable[[], int], max_open: int) -> None:
        self._registry = CollectorRegistry()
        self._responses = self._bind("quire_gateway_responses_total")
        self.first_token_seconds = self._bind("quire_gateway_first_token_seconds")
        self.streams_resumed = self._bind("quire_gateway_streams_resumed_total")
        self.hang_ups = self._bind("quire_gateway_hang_ups_total")
        self._broken = self._bind("quire_gateway_streams_broken_total")
        open_answers = self._bind("quire_gateway_open_answers")
        open_answers["limit",].set(max_open)
        open_answers["open",].set_function(lambda: float(num_open()))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def count_response(self, route: str, status: int) -> None:
        """A response has begun."""
        self._responses[route, str(status)].inc()

    def count_broken(self, code: str) -> None:
        """A stream has ended in an error of this code."""
        self._broken[_REASONS.get(code, "failed"),].inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the format that a scraper's `accept` asks for, and their content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _bind(self, name: str) -> Any:
        """The instrument; if it has labels, its children by label values."""
        family = gateway_families()[name]
        instrument = build_instrument(family, self._registry)
        if not family.labels:
            return instrument
        return {
            values: instrument.labels(*values)
            for values in itertools.product(*family.labels.values())
        }
