"""The metrics of one notifier, built from its register. All label values exist from the start."""

import itertools
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from service.notifier.register import notifier_families
from service.shared.instruments import build_instrument


class NotifierMetrics:
    """What a notifier counts. `num_open_circuits` is read at each scrape."""

    def __init__(self, *, num_open_circuits: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._ends = self._bind("quire_notifier_ends_total")
        self._posts = self._bind("quire_notifier_posts_total")
        self._given_up = self._bind("quire_notifier_given_up_total")
        self._delay = self._bind("quire_notifier_delay_seconds")
        self._waiting = self._bind("quire_notifier_queue_webhooks")
        #: Shard -> webhooks that are due, and all that wait.
        self._of_shards: dict[int, tuple[int, int]] = {}
        self._contact_at = time.monotonic()
        circuits = self._bind("quire_notifier_open_circuits")
        circuits.set_function(lambda: float(num_open_circuits()))
        since_contact = self._bind("quire_notifier_seconds_since_contact")
        since_contact.set_function(lambda: self.seconds_since_contact)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    @property
    def seconds_since_contact(self) -> float:
        """Seconds since Redis last answered."""
        return time.monotonic() - self._contact_at

    def note_contact(self) -> None:
        """Redis has answered."""
        self._contact_at = time.monotonic()

    def note_waiting(self, shard: int, *, num_due: int, num: int) -> None:
        """Redis has answered with the numbers of webhooks that wait in a shard."""
        self.note_contact()
        self._of_shards[shard] = (num_due, num)
        due, all_of_them = map(sum, zip(*self._of_shards.values(), strict=True))
        self._waiting["due",].set(due)
        self._waiting["later",].set(all_of_them - due)

    def count_end(self, fate: str) -> None:
        """An end was read."""
        self._ends[fate,].inc()

    def count_taken(self, delay_seconds: float) -> None:
        """An endpoint has taken a webhook."""
        self._posts["taken",].inc()
        self._delay.observe(max(0.0, delay_seconds))

    def count_failure(self, kind: str) -> None:
        """An attempt has failed."""
        self._posts[kind,].inc()

    def count_given_up(self, reason: str) -> None:
        """A webhook is not tried again."""
        self._given_up[reason,].inc()

    def _bind(self, name: str) -> Any:
        """The instrument; if it has labels, its children by label values."""
        family = notifier_families()[name]
        instrument = build_instrument(family, self.registry)
        if not family.labels:
            return instrument
        return {
            values: instrument.labels(*values)
            for values in itertools.product(*family.labels.values())
        }
