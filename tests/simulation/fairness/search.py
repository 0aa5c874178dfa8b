"""Every state that tenants of one class can reach within bounds, and the laws of fairness.

F1  Between two tenants that both have requests that wait, the tokens that were claimed since any
    moment, divided by the weights, differ by at most the largest request of each.
F2  A tenant that returns waits for at most one request of each other tenant.
F3  The requests of one tenant are claimed in their order.

Each with one token more for every request that was lifted, as these are set a token apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from tests.simulation.fairness.model import (
    ClassState,
    FirstComeFirstServed,
    LiftedBehindAll,
    NeverLifted,
    OwnOrderLost,
    RequestsCounted,
    Share,
    Sharing,
    TimeStandsStill,
    Waiting,
    WeightsIgnored,
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may happen: the requests of each tenant, their sizes in tokens, and the weights.

    `num_ends`: how many claimed requests may end with none of their answer used.
    """

    name: str
    num_requests: tuple[int, ...]
    weights: tuple[int, ...]
    sizes: tuple[int, ...] = (40, 120)
    num_ends: int = 0

    def largest(self, tenant: int) -> int:
        return Sharing(self.weights).length(tenant, max(self.sizes))


class Position(NamedTuple):
    """A state, what is left to happen, and by how much each pair of tenants has drifted apart."""

    state: ClassState
    left: tuple[int, ...]
    num_ends: int
    drifts: tuple[int, ...]
    running: tuple[Waiting, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """`broken` is the first sentence about a broken law, with the way to it; or empty."""

    num_positions: int
    broken: str = ""
    way: tuple[str, ...] = ()


def explore(bounds: Bounds, kind: type[Sharing] = Sharing) -> Found:
    """Every position, breadth first; stops at the first broken law."""
    sharing = kind(bounds.weights)
    pairs = tuple(permutations(range(len(bounds.weights)), 2))
    first = Position(
        ClassState.empty(len(bounds.weights)),
        bounds.num_requests,
        bounds.num_ends,
        (0,) * len(pairs),
    )
    came_from: dict[Position, tuple[Position, str] | None] = {first: None}
    queue = [first]
    for position in queue:
        for label, after, broken in _steps(position, sharing, bounds, pairs):
            if broken:
                return Found(len(came_from), broken, (*_way(came_from, position), label))
            following = canonical(after)
            if following not in came_from:
                came_from[following] = (position, label)
                queue.append(following)
    return Found(len(came_from))


#: What stands for the virtual time in a canonical position; 0 means that nothing is counted.
ORIGIN = 10_000


def canonical(position: Position) -> Position:
    """The same position at another virtual time, with other numbers of requests."""
    state = position.state
    if not state.waiting and not position.running:
        return position._replace(state=ClassState.empty(len(state.shares)))
    shift = ORIGIN - state.time
    numbers = {number: n for n, number in enumerate(sorted(o.number for o in state.waiting))}
    waiting = tuple(
        one._replace(start=one.start + shift, number=numbers[one.number]) for one in state.waiting
    )
    shares = tuple(
        Share(*(value + shift if value > state.time else 0 for value in share))
        for share in state.shares
    )
    state = ClassState(
        shares=shares,
        time=ORIGIN,
        lifted=max(state.lifted, state.time - 1) + shift,
        newest=max(state.newest, state.time) + shift,
        since=state.since + shift if position.running else ORIGIN,
        num_submitted=len(waiting),
        waiting=tuple(sorted(waiting)),
    )
    running = sorted(one._replace(start=one.start + shift, number=-1) for one in position.running)
    running = [one._replace(number=-1 - n) for n, one in enumerate(running)]
    return position._replace(state=state, running=tuple(running))


def _way(
    came_from: dict[Position, tuple[Position, str] | None], position: Position
) -> tuple[str, ...]:
    labels: list[str] = []
    while (step := came_from[position]) is not None:
        position, label = step
        labels.append(label)
    return tuple(reversed(labels))


def _steps(
    position: Position, sharing: Sharing, bounds: Bounds, pairs: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, Position, str]]:
    state = position.state
    for tenant, left in enumerate(position.left):
        for tokens in bounds.sizes if left else ():
            remaining = tuple(n - (t == tenant) for t, n in enumerate(position.left))
            after = sharing.submitted(state, tenant, tokens)
            yield f"{tenant} submits {tokens}", position._replace(state=after, left=remaining), ""
    if state.waiting:
        request = sharing.next(state)
        after = sharing.claimed(state, request)
        drifts = _drifted(position.drifts, pairs, before=state, after=after, request=request)
        running = (*position.running, request) if position.num_ends else ()
        claimed = position._replace(state=after, drifts=drifts, running=running)
        broken = _broken(claimed, request, bounds, pairs, before=state)
        yield f"{request.tenant} is claimed", claimed, broken
    for request in position.running if position.num_ends else ():
        running = tuple(one for one in position.running if one != request)
        ended = position._replace(
            state=sharing.given_back(state, request, 0.75, is_free=False),
            num_ends=position.num_ends - 1,
            running=running,
        )
        yield f"{request.tenant} ends early", ended, ""


def _drifted(
    drifts: tuple[int, ...],
    pairs: Sequence[tuple[int, int]],
    *,
    before: ClassState,
    after: ClassState,
    request: Waiting,
) -> tuple[int, ...]:
    """For each pair, the most that the first got more than the second, since any moment."""
    had, has = ({one.tenant for one in state.waiting} for state in (before, after))
    found = []
    for (one, other), drift in zip(pairs, drifts, strict=True):
        now = drift
        if request.tenant == one and other in had:
            now = drift + request.length
        elif request.tenant == other:
            now = max(0, drift - request.length)
        found.append(now if {one, other} <= has else 0)
    return tuple(found)


def _broken(
    position: Position,
    request: Waiting,
    bounds: Bounds,
    pairs: Sequence[tuple[int, int]],
    *,
    before: ClassState,
) -> str:
    num_lifted = sum(bounds.num_requests)
    # What was given back counts for later requests: so much more may be claimed of its tenant.
    spared = sum(bounds.largest(tenant) for tenant in range(len(bounds.weights))) * bool(
        bounds.num_ends
    )
    for (one, other), drift in zip(pairs, position.drifts, strict=True):
        most = bounds.largest(one) + bounds.largest(other) + num_lifted + spared
        if drift > most:
            return f"F1: tenant {one} got {drift} tokens more than tenant {other}, {most} at most"
    for tenant, tokens in enumerate(request.passed):
        if tenant != request.tenant and tokens > bounds.largest(tenant) + num_lifted:
            return f"F2: a tenant that returned waited for {tokens} tokens of tenant {tenant}"
    if any(o.tenant == request.tenant and o.number < request.number for o in before.waiting):
        return "F3: a request has overtaken an earlier one of its tenant"
    return ""


SCENARIOS = (
    Bounds("two tenants", (3, 3), (1, 1)),
    Bounds("two tenants, more requests", (5, 4), (1, 1), sizes=(40,)),
    Bounds("two tenants, weights", (3, 3), (1, 3), sizes=(30, 90)),
    Bounds("three tenants", (2, 2, 2), (1, 1, 2), sizes=(40,)),
    Bounds("what is given back", (4, 2), (1, 1), sizes=(40,), num_ends=2),
)

#: What the tests do not run; `python -m tests.simulation.fairness` does.
LARGE_SCENARIOS = (
    Bounds("two tenants, still more requests", (6, 5), (1, 1), sizes=(40,)),
    Bounds("two tenants, two sizes each", (4, 4), (1, 1)),
    Bounds("three tenants, two sizes each", (2, 2, 2), (1, 2, 5)),
    Bounds("what is given back, longer", (4, 3), (1, 1), sizes=(40,), num_ends=3),
)

#: Doctored rules, the bounds within which they are found out, and the law that they break.
CONTROLS = (
    (FirstComeFirstServed, SCENARIOS[0], "F2"),
    (NeverLifted, SCENARIOS[1], "F2"),
    (LiftedBehindAll, SCENARIOS[0], "F2"),
    (RequestsCounted, SCENARIOS[0], "F2"),
    (WeightsIgnored, SCENARIOS[2], "F1"),
    (TimeStandsStill, SCENARIOS[1], "F1"),
    (OwnOrderLost, SCENARIOS[4], "F3"),
)
