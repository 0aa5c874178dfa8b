"""How the tenants of a class share it, as pure functions: the counterpart of fairness.lua.

Knows no Redis and no moments: a start stands for the moment that belongs to it. `test_scripts.py`
holds this file and the scripts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Waiting(NamedTuple):
    """A request that waits. `length`: its tokens divided by the weight of its tenant.

    `number` orders requests of one start. `passed`: what was claimed of each tenant since the
    submit of a request that was lifted, () for any other.
    """

    start: int
    number: int
    tenant: int
    length: int
    passed: tuple[int, ...] = ()


class Share(NamedTuple):
    """Where the next request of a tenant starts, and where its last one did; 0 for not counted."""

    finish: int = 0
    last: int = 0


class ClassState(NamedTuple):
    """One class: its virtual time, the last start that was lifted, the latest, and the first one.

    `time` is 0 before the first request.
    """

    shares: tuple[Share, ...]
    time: int = 0
    lifted: int = 0
    newest: int = 0
    since: int = 0
    num_submitted: int = 0
    waiting: tuple[Waiting, ...] = ()

    @classmethod
    def empty(cls, num_tenants: int) -> ClassState:
        return cls((Share(),) * num_tenants)


class Sharing:
    """The rules. Each method returns the state after it."""

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = tuple(weights)

    def length(self, tenant: int, tokens: int) -> int:
        # As Lua rounds: a half goes up.
        return max(1, int(tokens / self.weights[tenant] + 0.5))

    def submitted(self, state: ClassState, tenant: int, tokens: int, *, now: int = 1) -> ClassState:
        """A request is queued at `now`, its arrival. It is the last one of `waiting`."""
        state = self.prepared(state, now)
        start, is_lifted = self.start_of(state, tenant)
        if is_lifted:
            state = state._replace(lifted=max(state.lifted, start))
        length = self.length(tenant, tokens)
        request = Waiting(start, state.num_submitted, tenant, length)
        if is_lifted:
            request = request._replace(passed=(0,) * len(state.shares))
        state = with_share(state, tenant, Share(start + length, start))
        return state._replace(
            newest=max(state.newest, start),
            num_submitted=state.num_submitted + 1,
            waiting=(*state.waiting, request),
        )

    def prepared(self, state: ClassState, now: int) -> ClassState:
        """All is forgotten when nothing waits; otherwise what the virtual time has passed."""
        if not state.waiting:
            start = max(now, state.newest + 1, state.time + 1) if state.time else now
            return state._replace(
                shares=(Share(),) * len(state.shares),
                time=start,
                lifted=start - 1,
                newest=start,
                since=start,
            )
        shares = tuple(
            Share(*(value if value > state.time else 0 for value in share))
            for share in state.shares
        )
        return state._replace(shares=shares)

    def start_of(self, state: ClassState, tenant: int) -> tuple[int, bool]:
        """The start of the next request of a tenant, and whether it was lifted."""
        share = state.shares[tenant]
        start = max(share.finish, share.last + 1 if share.last else 0)
        if start < state.time:
            return max(state.time, state.lifted + 1), True
        return start, False

    def claimed(self, state: ClassState, request: Waiting) -> ClassState:
        """A request is claimed. Others that were lifted have let it pass."""
        waiting = tuple(
            one._replace(
                passed=tuple(
                    tokens + request.length * (tenant == request.tenant)
                    for tenant, tokens in enumerate(one.passed)
                )
            )
            for one in state.waiting
            if one.number != request.number
        )
        return state._replace(time=max(state.time, request.start), waiting=waiting)

    def next(self, state: ClassState) -> Waiting:
        """The request that is claimed next."""
        return min(state.waiting)

    def given_back(
        self, state: ClassState, request: Waiting, part: float, *, is_free: bool
    ) -> ClassState:
        """A part of the length of a request that has ended; `is_free`: while it waited."""
        state = state._replace(
            waiting=tuple(one for one in state.waiting if one.number != request.number)
        )
        if request.start < state.since:
            return state
        finish, last = state.shares[request.tenant]
        back = int(request.length * part)
        if finish and back:
            finish = max(0, finish - back)
        if is_free and last >= request.start:
            last = request.start - 1
        return with_share(state, request.tenant, Share(finish, last))


def with_share(state: ClassState, tenant: int, share: Share) -> ClassState:
    shares = tuple(share if n == tenant else one for n, one in enumerate(state.shares))
    return state._replace(shares=shares)


# Doctored rules: each breaks a law on purpose.


class FirstComeFirstServed(Sharing):
    def start_of(self, state: ClassState, tenant: int) -> tuple[int, bool]:
        return state.newest + 1, super().start_of(state, tenant)[1]


class NeverLifted(Sharing):
    """A tenant that returns gets what it has missed."""

    def start_of(self, state: ClassState, tenant: int) -> tuple[int, bool]:
        start, is_lifted = super().start_of(state, tenant)
        return (1, True) if is_lifted else (start, False)


class LiftedBehindAll(Sharing):
    """A tenant that returns waits for all that wait."""

    def start_of(self, state: ClassState, tenant: int) -> tuple[int, bool]:
        start, is_lifted = super().start_of(state, tenant)
        return (state.newest + 1, True) if is_lifted else (start, False)


class RequestsCounted(Sharing):
    """Each request counts the same, whatever its tokens."""

    def length(self, tenant: int, tokens: int) -> int:
        return 1

    def submitted(self, state: ClassState, tenant: int, tokens: int, *, now: int = 1) -> ClassState:
        after = super().submitted(state, tenant, tokens, now=now)
        honest = Sharing.length(self, tenant, tokens)
        return after._replace(
            waiting=(*after.waiting[:-1], after.waiting[-1]._replace(length=honest))
        )


class WeightsIgnored(RequestsCounted):
    def length(self, tenant: int, tokens: int) -> int:
        return tokens


class TimeStandsStill(Sharing):
    def claimed(self, state: ClassState, request: Waiting) -> ClassState:
        return super().claimed(state, request)._replace(time=state.time)


class OwnOrderLost(Sharing):
    """What is given back lets a tenant's requests overtake each other."""

    def start_of(self, state: ClassState, tenant: int) -> tuple[int, bool]:
        unordered = with_share(state, tenant, state.shares[tenant]._replace(last=0))
        return super().start_of(unordered, tenant)
