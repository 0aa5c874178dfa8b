"""Shares of the priority classes in the tokens and the slots of a step. Knows no queue, no blocks.

A share is a minimum, for a class that has work: so much of each step's token budget, and so many of
the slots. What a class does not use goes to the others in the usual order, so shares cost nothing
while classes do not compete. Three rules follow from them:

- Before the usual order, each class gets tokens up to its minimum.
- Up to its minimum of slots, a class is admitted before the others when a slot is free.
- A class that has no more than its minimum of slots loses none to a better class.

A class may use its slots and still not come to its share of the tokens, for instance while its few
requests decode and others prefill. So what it lacks is added up while it has requests waiting, and
for each budget of a step that it lacks, its minimum of slots is one higher.

Running requests still get a token each, first of all. Memory is not shared out: where blocks are
short, a decode takes them from whichever request stands worst.
"""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.request import Priority, Request
from engine.scheduling.plan import Plan
from engine.scheduling.running_set import RunningSet
from engine.scheduling.waiting_queue import WaitingQueue


@dataclass(slots=True)
class Lane:
    """Whose prefill is planned next: that of one class up to its minimum, or of all (None)."""

    level: Priority | None = None
    #: The most tokens that may still be planned in it.
    room: int = sys.maxsize

    def takes(self, request: Request, plan: Plan) -> bool:
        """Whether it plans a running request, or the rest of its tokens."""
        is_whole = plan.num_planned(request) >= request.num_pending_tokens
        return not is_whole and self.level in (None, request.priority)


class ClassShares:
    """The minimum of each class. Without shares in the config, no class has one."""

    def __init__(self, config: EngineConfig, running: RunningSet) -> None:
        shares = config.class_shares
        self._running = running
        self._shares = shares
        self._budget = config.max_num_batched_tokens
        self._tokens = minimums(shares, self._budget)
        self._slots = minimums(shares, running.max_requests)
        #: Tokens that a class with waiting requests lacks of its share of what was computed.
        self._lacking = dict.fromkeys(Priority, 0.0)

    def lanes(self, plan: Plan) -> list[Lane]:
        """The lanes of a step: each class with less than its minimum of tokens, and then all.

        First comes the class that lacks most for its share; among equals the best one.
        """
        if not self._shares:
            return [Lane()]
        decodes = self._decodes(plan)
        rooms = [(level, self._tokens[level] - decodes[level]) for level in reversed(Priority)]
        lanes = [Lane(level, room) for level, room in rooms if room > 0]
        lanes.sort(key=lambda lane: self._lack_for_share(lane.level), reverse=True)
        return [*lanes, Lane()]

    def _lack_for_share(self, level: Priority | None) -> float:
        assert level is not None
        return self._lacking[level] / self._shares[level]

    def may_admit(self, lane: Lane) -> bool:
        """Whether the lane may admit a request: that of one class only up to its slots."""
        if lane.level is None:
            return True
        more = int(self._lacking[lane.level] // self._budget)
        return self._running.num_of_class(lane.level) < self._slots[lane.level] + more

    def note(self, plan: Plan, waiting: WaitingQueue) -> None:
        """Add up what each class lacks after a plan; nothing, for one without a request waiting."""
        if not self._shares:
            return
        tokens = self._decodes(plan)
        for row, request in plan.rows.values():
            tokens[request.priority] += len(row.token_ids)
        most = self._budget * self._running.max_requests
        for level, share in zip(Priority, self._shares, strict=True):
            lacking = self._lacking[level] + share * tokens.total() - tokens[level]
            has_more = waiting.peek(only=level) is not None
            self._lacking[level] = min(max(0.0, lacking), most) if has_more else 0.0

    def _decodes(self, plan: Plan) -> Counter[Priority]:
        """The decodes of each class in the plan."""
        if not plan.has_decodes:
            return Counter()
        running = Counter(request.priority for request in self._running.requests.values())
        running.subtract(request.priority for request in self._running.catching_up.values())
        return running

    def without_minimum(self, victims: Sequence[Request]) -> list[Request]:
        """The `victims`, in their order, whose loss leaves each class its minimum of slots."""
        if not self._shares:
            return list(victims)
        kept, spare = [], {}
        for level in Priority:
            # Rounded up: a slot that was given for a lack is kept until nothing is lacking.
            more = math.ceil(self._lacking[level] / self._budget)
            spare[level] = self._running.num_of_class(level) - self._slots[level] - more
        for victim in victims:
            if spare[victim.priority] > 0:
                spare[victim.priority] -= 1
                kept.append(victim)
        return kept


def minimums(shares: Sequence[float], total: int) -> dict[Priority, int]:
    """The part of `total` that each class gets at least; empty without shares.

    A class with a share gets at least 1 if `total` has one for each of them. Shares are rounded up
    where the sum allows it; where it does not, those that gain most by it are rounded down.
    """
    if not shares:
        return {}
    exact = {level: share * total for level, share in zip(Priority, shares, strict=True)}
    # Not 7 for 0.07 * 100, which is a little more than 7.
    parts = {level: math.ceil(round(part, 9)) for level, part in exact.items()}
    while sum(parts.values()) > total:
        rounded = [level for level in Priority if parts[level] > 1] or [*Priority]
        most = max(rounded, key=lambda level: parts[level] - exact[level])
        parts[most] -= 1
    return parts
