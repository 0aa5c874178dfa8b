"""Finds the requests that one worker should claim next, apart from those that it should leave.

Knows no room and no engine: Intake says how many, and of which classes.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

from engine.request import Priority
from quire.queue.claim.ingress import Candidate
from quire.queue.roles import WorkerSide
from quire.wire.protocol import Priority as WirePriority
from service.worker.outgoing.contact import Contact

#: The largest offset behind the heads, in searches. Eight workers that claim without a pause lose
#: 0.8 to 1.1 claims for each granted one; 1.5 to 1.9 with an offset of 1, 2.1 to 3.3 without.
SPREAD = 4


class Candidates:
    """Reads the heads of one shard for one intake. `skip_seconds` is how long `skip` applies."""

    def __init__(
        self,
        broker: WorkerSide,
        *,
        contact: Contact,
        skip_seconds: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._broker = broker
        self._contact = contact
        self._skip_seconds = skip_seconds
        self._clock = clock
        #: Until when each request is skipped.
        self._skipped: dict[str, float] = {}
        self._is_crowded = False
        self._random = random.SystemRandom()

    def find(
        self, count: int, *, least: Priority = Priority.LOW, block_seconds: float = 0.0
    ) -> tuple[list[Candidate], bool]:
        """Up to `count` requests, by rank, and whether others were only skipped.

        If the last claims were lost to other workers, which had read the same heads, the next
        search begins at a random offset behind the heads, once.
        """
        now = self._clock()
        self._skipped = {name: end for name, end in self._skipped.items() if end > now}
        offset = self._random.randrange(SPREAD * count + 1) if self._is_crowded else 0
        self._is_crowded = False
        peek = partial(
            self._broker.peek,
            count=count + offset + len(self._skipped),
            block_seconds=block_seconds,
            least=WirePriority(least),
        )
        found = self._contact.call("read", peek)
        left = [one for one in found if one.request_id not in self._skipped]
        # A smaller offset if too few would be left behind it.
        first = min(offset, max(0, len(left) - count))
        return left[first : first + count], bool(found) and not left

    def skip(self, request_ids: Sequence[str], *, seconds: float | None = None) -> None:
        """Skip requests that cannot be claimed now: they would stay in front of all others.

        For `seconds`, by default for `skip_seconds`.
        """
        end = self._clock() + (self._skip_seconds if seconds is None else seconds)
        self._skipped |= dict.fromkeys(request_ids, end)

    def note(self, num_claimed: int, *, of: int) -> None:
        """Note how many of the claims of the last candidates were granted."""
        self._is_crowded = 2 * num_claimed < of
