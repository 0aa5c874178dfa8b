"""Lets each request that may have killed its last worker begin alone, lest others die beside it.

A process killed in a step does not say which request was to blame. If all that it ran began
together again, the innocent would be charged with as many attempts as the culprit and be given up
with it. So a request whose earlier claims died with their workers is tried: it begins alone, and
the trial ends once it has ended or has published as much as CLAIM says: something, where an earlier
claim had published nothing, and more where several got on for a while; see `Delivery.is_on_trial`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.request import Priority
from service.outgoing.outbox import Outbox


class Trials:
    """What one intake has to ask before it claims, and before it opens what it has claimed.

    All trials of a worker are in its Outbox, whichever intake began them.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        #: The last batch had one that may have killed workers; more may follow: one at a time.
        self._is_careful = False

    def forbid(self, least: Priority) -> bool:
        """Whether no request of class `least` may be claimed: one like it or better is on trial.

        Should that one kill this worker, each that has published nothing would be charged with an
        attempt. What is more urgent need not wait for it.
        """
        return self._outbox.has_trial(least)

    def limit(self, room: int) -> int:
        """How many of `room` requests may be claimed at once."""
        return min(room, 1) if self._is_careful else room

    @contextmanager
    def beginning(self, trials: Sequence[int], *, first: Priority) -> Iterator[int]:
        """How many of the requests just claimed may begin now; the others are given back.

        `trials` has the `trial_tokens` of each, in the order of their claims: 0 for no suspect;
        `first` is the class of the first. Those that may begin are the first ones: all before the
        first suspect, or that one alone. None if it came first while one like it or better is on
        trial: what is more urgent does not wait here either, or a trial of bulk that waits for a
        slot would keep it out. They are to be opened inside the context: other intakes wait until
        then, or two suspects could begin together.
        """
        with self._outbox.trials:
            count = next((n for n, each in enumerate(trials) if each > 0), len(trials))
            self._is_careful = count < len(trials)
            if count == 0 and not self._outbox.has_trial(first):
                count = 1
            yield count
