"""The metrics of one batcher, built from its register. All label values exist from the start."""

import time
from collections.abc import Callable

from service.batcher.register import batcher_families
from service.shared.instruments import Instruments


class BatcherMetrics:
    """What a batcher counts. `num_running` is read at each scrape."""

    def __init__(self, *, num_running: Callable[[], int], most_running: int) -> None:
        instruments = Instruments(batcher_families())
        self.registry, bind = instruments.registry, instruments.bind
        self._claims = bind("quire_batcher_claims_total")
        self._lines = bind("quire_batcher_lines_total")
        self._deleted = bind("quire_batcher_deleted_total")
        self._queue = bind("quire_batcher_queue_batches")
        self._contact_at = time.monotonic()
        batches = bind("quire_batcher_batches")
        batches["limit"].set(most_running)
        batches["running"].set_function(lambda: float(num_running()))
        since_contact = bind("quire_batcher_seconds_since_contact")
        since_contact.set_function(lambda: self.seconds_since_contact)

    @property
    def seconds_since_contact(self) -> float:
        """Seconds since Redis last answered."""
        return time.monotonic() - self._contact_at

    def note_contact(self, *, num_open: int, num_free: int) -> None:
        """Redis has answered, with the numbers of batches that have not ended."""
        self._contact_at = time.monotonic()
        self._queue["held"].set(num_open - num_free)
        self._queue["free"].set(num_free)

    def count_claim(self, ending: str) -> None:
        """A claim of a batch has ended."""
        self._claims[ending].inc()

    def count_lines(self, *, completed: int, failed: int) -> None:
        """Lines have got a result or an error."""
        self._lines["completed"].inc(completed)
        self._lines["failed"].inc(failed)

    def count_deleted(self, kind: str) -> None:
        """A file or the record of a batch was deleted."""
        self._deleted[kind].inc()
