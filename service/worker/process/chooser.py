"""Decides which of several models a worker serves next, by what waits in their queues.

The rule, in this order:

1. A model that has nothing to do is left at once for the one that has waited longest.
2. A model that has work is served for `stay_seconds`.
3. After that it is left if another one has waited for `wait_seconds`: for the one that has waited
   longest.

A model waits from the arrival of its oldest queued request, or from when this worker left it,
whichever is later. Otherwise two models with old requests would take turns for ever, and a third
one would never be served.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

import redis
import structlog

from quire.errors import UNAVAILABLE
from quire.queue.view.inspection import ShardState, inspect_shards
from service.worker.observe.vitals import Vitals
from service.worker.outgoing.contact import Contact
from service.worker.process.places import Place

#: The pause between two looks at the queues.
LOOK_SECONDS = 0.1

#: The name of the thread.
THREAD = "chooser"

_log = structlog.get_logger("service.worker.process.chooser")


@dataclass(frozen=True, slots=True)
class Demand:
    """What waits for one model: queued requests, and the seconds since the oldest one arrived."""

    num_queued: int = 0
    waited_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Rules:
    """The two times of the rule, in seconds."""

    stay_seconds: float
    wait_seconds: float


def next_model(
    served: str,
    demands: Mapping[str, Demand],
    *,
    rules: Rules,
    served_seconds: float,
    has_work: bool,
    left_seconds: Mapping[str, float],
) -> str | None:
    """The model to switch to; None to stay.

    `left_seconds`: how long ago this worker left each model; one that is absent was never served.
    `has_work`: the worker holds requests of the served model.
    """
    waits = {
        name: min(demand.waited_seconds, left_seconds.get(name, inf))
        for name, demand in demands.items()
        if name != served and demand.num_queued
    }
    if not waits:
        return None
    longest = max(waits, key=lambda name: waits[name])
    if not has_work and not demands[served].num_queued:
        return longest
    if served_seconds < rules.stay_seconds or waits[longest] < rules.wait_seconds:
        return None
    return longest


class Chooser:
    """Looks at all queues of a worker and reports each switch. `run` is the body of a thread."""

    def __init__(
        self,
        places: Sequence[Place],
        connection: redis.Redis,
        *,
        rules: Rules,
        has_work: Callable[[], bool],
        report: Callable[[str], None],
        vitals: Vitals,
        contact: Contact,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._places = places
        self._connection = connection
        self._rules = rules
        self._has_work = has_work
        self._report = report
        self._vitals = vitals
        self._contact = contact
        self._clock = clock
        self._stopping = threading.Event()
        #: The served model and since when; None while a switch is under way.
        self._served: tuple[str, float] | None = None
        self._left: dict[str, float] = {}

    def run(self) -> None:
        """Look at the queues until stopped."""
        while not self._stopping.wait(LOOK_SECONDS):
            self._vitals.beat(THREAD)
            if self._served is not None and (chosen := self._choose(*self._served)) is not None:
                _log.debug("switch chosen", model=chosen)
                self._left[self._served[0]] = self._clock()
                self._served = None
                self._report(chosen)

    def serves(self, model: str) -> None:
        """Note that this model is served from now on."""
        self._served = (model, self._clock())

    def stop(self) -> None:
        """Make `run` return."""
        self._stopping.set()

    def _choose(self, served: str, since: float) -> str | None:
        keys = [place.broker.keys for place in self._places]
        try:
            states = self._contact.call("read", lambda: inspect_shards(self._connection, keys))
        except UNAVAILABLE:
            return None
        shards: dict[str, list[ShardState]] = {place.model: [] for place in self._places}
        for place, state in zip(self._places, states, strict=True):
            shards[place.model].append(state)
        now = self._clock()
        return next_model(
            served,
            {model: _demand(of) for model, of in shards.items()},
            rules=self._rules,
            served_seconds=now - since,
            has_work=self._has_work(),
            left_seconds={model: now - left for model, left in self._left.items()},
        )


def _demand(shards: Sequence[ShardState]) -> Demand:
    """What waits in the shards of a queue; nothing in a paused one."""
    open_ = [shard for shard in shards if not shard.is_paused]
    waited = [one.undelivered_seconds for shard in open_ for one in shard.ingress]
    return Demand(sum(shard.num_queued for shard in open_), max(waited, default=0.0))
