"""REAP, PROMOTE and EXPIRE move requests whose time has come.

Any worker or operator may do this at any time. The script checks each request again, so that
several workers that look at the same time move each request once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.keys import Keys
from quire.queue.lease.expire import expire_call
from quire.queue.repair.damage import Mending
from quire.queue.request.arguments import MAX_ITEMS_PER_CALL, call_on
from quire.transport.procedure import command
from quire.transport.script_calls import ScriptCall
from quire.wire.output import State


@dataclass(frozen=True, slots=True)
class Reaped:
    """A request whose lease had expired: queued again, or ended (`state` is terminal)."""

    request_id: str
    state: State


@dataclass(frozen=True, slots=True)
class Promoted:
    """A scheduled request that was due: queued, or ended (`state` is terminal)."""

    request_id: str
    state: State


@dataclass(frozen=True, slots=True)
class Expired:
    """A request that was ended because it had waited too long; `state` is terminal."""

    request_id: str
    state: State


class Expiring(Mending):
    """Ends what has waited too long."""

    def expire(self, *, limit: int = MAX_ITEMS_PER_CALL) -> list[Expired]:
        """Ends the waiting requests that are past their deadline or too long in the queue.

        A claim would end them, too, but in a busy or paused queue no worker claims them. Any worker
        or operator may call it at any time. At most `limit`, earliest time first.
        """
        return [
            Expired(*moved)
            for moved in self._move("expire", expire_call, times=self.keys.wait, limit=limit)
        ]

    def _move(
        self,
        transition: str,
        call: Callable[[Keys, Sequence[str]], ScriptCall],
        *,
        times: str,
        limit: int,
    ) -> Iterator[tuple[str, State]]:
        """Runs a transition on the requests that are due, according to a sorted set of times."""
        now = self.now_ms()
        read = command("zrangebyscore", times, "-inf", now, start=0, num=limit)
        due = self._ids_in(times, self._read(read))
        # The script checks each time again, because it may have changed meanwhile.
        for request_id, state in self._run_on(due, transition, call):
            yield request_id, State(state)


class Moving(Expiring):
    """Moves what has lost its worker, or waits for its time."""

    def reap(self, *, limit: int = MAX_ITEMS_PER_CALL) -> list[Reaped]:
        """Takes requests back whose leases have expired; any worker may call it at any time.

        Each is requeued with its tokens. It ends instead if it was cancelled, is past its deadline,
        or has no attempts left; in the last case it leaves a dead letter. A claim that has
        published tokens does not count as an attempt. A request with tokens keeps its arrival, and
        so comes before later ones. At most `limit`, oldest lease first.

        """
        return [
            Reaped(*moved)
            for moved in self._move("reap", call_on, times=self.keys.lease, limit=limit)
        ]

    def promote(self, *, limit: int = MAX_ITEMS_PER_CALL, ends_late: bool = True) -> list[Promoted]:
        """Queues the scheduled requests that are due, and ends waiting requests that are late.

        Any worker may call it at any time. At most `limit` of each, earliest time first. Returns
        only those that were due; to get the late ones, pass `ends_late=False` and call `expire`.
        """
        promoted = [
            Promoted(*moved)
            for moved in self._move("promote", call_on, times=self.keys.delay, limit=limit)
        ]
        if ends_late:
            self.expire(limit=limit)
        return promoted
