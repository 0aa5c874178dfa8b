"""The metrics of one notifier, built from its register. All label values exist from the start."""

import time
from collections.abc import Callable

from service.notifier.register import notifier_families
from service.shared.instruments import Instruments


class NotifierMetrics:
    """What a notifier counts. `num_open_circuits` is read at each scrape."""

    def __init__(self, *, num_open_circuits: Callable[[], int]) -> None:
        instruments = Instruments(notifier_families())
        self.registry, bind = instruments.registry, instruments.bind
        self._ends = bind("quire_notifier_ends_total")
        self._posts = bind("quire_notifier_posts_total")
        self._given_up = bind("quire_notifier_given_up_total")
        self._delay = bind("quire_notifier_delay_seconds")
        self._waiting = bind("quire_notifier_queue_webhooks")
        #: Shard -> webhooks that are due, and all that wait.
        self._of_shards: dict[int, tuple[int, int]] = {}
        self._contact_at = time.monotonic()
        circuits = bind("quire_notifier_open_circuits")
        circuits.set_function(lambda: float(num_open_circuits()))
        since_contact = bind("quire_notifier_seconds_since_contact")
        since_contact.set_function(lambda: self.seconds_since_contact)

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
        self._waiting["due"].set(due)
        self._waiting["later"].set(all_of_them - due)

    def count_end(self, fate: str) -> None:
        """An end was read."""
        self._ends[fate].inc()

    def count_taken(self, delay_seconds: float) -> None:
        """An endpoint has taken a webhook."""
        self._posts["taken"].inc()
        self._delay.observe(max(0.0, delay_seconds))

    def count_failure(self, kind: str) -> None:
        """An attempt has failed."""
        self._posts[kind].inc()

    def count_given_up(self, reason: str) -> None:
        """A webhook is not tried again."""
        self._given_up[reason].inc()
