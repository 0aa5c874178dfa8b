"""The metrics of one gateway, built from its register. All label values exist from the start."""

from collections.abc import Callable

from prometheus_client.exposition import choose_encoder

from service.gateway.register import gateway_families
from service.shared.instruments import Instruments

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
        instruments = Instruments(gateway_families())
        self._registry, bind = instruments.registry, instruments.bind
        self._responses = bind("quire_gateway_responses_total")
        self.first_token_seconds = bind("quire_gateway_first_token_seconds")
        self.streams_resumed = bind("quire_gateway_streams_resumed_total")
        self.hang_ups = bind("quire_gateway_hang_ups_total")
        self._broken = bind("quire_gateway_streams_broken_total")
        open_answers = bind("quire_gateway_open_answers")
        open_answers["limit"].set(max_open)
        open_answers["open"].set_function(lambda: float(num_open()))

    def count_response(self, route: str, status: int) -> None:
        """A response has begun."""
        self._responses[route, str(status)].inc()

    def count_broken(self, code: str) -> None:
        """A stream has ended in an error of this code."""
        self._broken[_REASONS.get(code, "failed")].inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the format that a scraper's `accept` asks for, and their content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
