"""Lets each request that may have killed its last worker start alone, to protect the others.

If a process is killed during a step, nothing shows which request was the cause. If all its requests
started together again, each would lose as many attempts as the cause, and all would be given up.
So a request whose earlier claims died with their workers is a suspect, and is on trial: it starts
alone. The trial ends when the request ends, or has published as many tokens as CLAIM demands: one
if an earlier claim published none, more if several claims died later; see `Delivery.is_on_trial`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.request import Priority
from service.worker.outgoing.outbox import Outbox


class Trials:
    """Limits how many requests one intake thread may claim, and which of them may start.

    A worker may have several intakes. The Outbox knows the trials of all of them.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        #: Whether the last batch had a suspect. More may follow, so the next claims are single.
        self._is_careful = False

    def forbid(self, least: Priority) -> bool:
        """Whether no request of class `least` may be claimed: this class or a better is on trial.

        If the trial kills this worker, every request that has published nothing loses an attempt.
        A request that is more urgent than all trials does not wait.
        """
        return self._outbox.has_trial(least)

    def limit(self, room: int) -> int:
        """The number of requests that may be claimed at once, at most `room`."""
        return min(room, 1) if self._is_careful else room

    @contextmanager
    def beginning(self, trials: Sequence[int], *, first: Priority) -> Iterator[int]:
        """The number of claimed requests that may start now; the caller gives back the others.

        `trials` has the `trial_tokens` of each request in the order of the claims, 0 if it is no
        suspect. `first` is the class of the first request. Either all requests before the first
        suspect may start, or a suspect that comes first may start alone. It may not start while a
        request of its class or a better one is on trial. A more urgent suspect does not wait:
        otherwise a trial of a bulk request that waits for a slot would block it.

        Open the requests inside the context. Other intakes wait until it ends, so that two suspects
        cannot start together.
        """
        with self._outbox.trials:
            count = next((n for n, each in enumerate(trials) if each > 0), len(trials))
            self._is_careful = count < len(trials)
            if count == 0 and not self._outbox.has_trial(first):
                count = 1
            yield count
