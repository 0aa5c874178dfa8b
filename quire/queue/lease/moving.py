"""Moves requests whose time has come: expired leases, scheduled requests that are due, late ones.

Any worker or operator may do this at any time. The transition checks each request again, so that
several workers that look at the same time move each request once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from quire.errors import ProtocolError
from quire.keys import Keys
from quire.queue.calls import (
    MAX_ITEMS_PER_CALL,
    expire_call,
    in_parts,
    promote_call,
    reap_call,
    restore_call,
    survey_call,
)
from quire.queue.repair.damage import condemn
from quire.queue.shard import Shard
from quire.queue.values import Expired, Lost, Promoted, Reaped, Restored
from quire.transport.procedure import command
from quire.transport.script_runner import ScriptCall
from quire.wire.output import State

#: About how many open requests one turn of `restore` examines: four calls of RESTORE, and about
#: 20 ms of the server.
OPEN_PER_TURN = 1000

#: The shortest time between two turns of `restore`, of all workers together: 0.5 % of the server.
TURN_MS = 4000

#: The pause between two passes over all open requests.
REST_MS = 30_000

#: How many open requests are looked at at once after a change of the policy: half a second.
MAX_RANKED = 20_000

_log = logging.getLogger(__name__)


class Moving(Shard):
    """The side of a Broker that moves requests whose time has come."""

    def reap(self, *, limit: int = MAX_ITEMS_PER_CALL) -> list[Reaped]:
        """Takes requests back whose leases have expired; any worker may call it at any time.

        Each is requeued with its tokens. It ends instead if it was cancelled, is past its deadline,
        or has no attempts left; in the last case it leaves a dead letter. A claim that has
        published tokens does not count as an attempt. A request with tokens keeps its arrival, and
        so comes before later ones. At most `limit`, oldest lease first.

        """
        return [
            Reaped(*moved)
            for moved in self._move("reap", reap_call, times=self.keys.lease, limit=limit)
        ]

    def promote(self, *, limit: int = MAX_ITEMS_PER_CALL, ends_late: bool = True) -> list[Promoted]:
        """Queues the scheduled requests that are due, and ends waiting requests that are late.

        Any worker may call it at any time. At most `limit` of each, earliest time first. Returns
        only those that were due; to get the late ones, pass `ends_late=False` and call `expire`.
        """
        promoted = [
            Promoted(*moved)
            for moved in self._move("promote", promote_call, times=self.keys.delay, limit=limit)
        ]
        if ends_late:
            self.expire(limit=limit)
        return promoted

    def expire(self, *, limit: int = MAX_ITEMS_PER_CALL) -> list[Expired]:
        """Ends the waiting requests that are past their deadline or too long in the queue.

        A claim would end them, too, but in a busy or paused queue no worker claims them. Any worker
        or operator may call it at any time. At most `limit`, earliest time first.
        """
        return [
            Expired(*moved)
            for moved in self._move("expire", expire_call, times=self.keys.wait, limit=limit)
        ]

    def restore(self, *, is_at_once: bool = False) -> list[Restored]:
        """Compares some open requests with the sets of the queue, and repairs losses.

        Keys can be deleted or evicted. Then no worker would find the request any more, so its entry
        is put back. After a change of the policy this also ranks waiting requests anew. Any worker
        may call this at any time. One turn examines the next OPEN_PER_TURN open requests. All
        workers share one cursor and one pace: a turn every TURN_MS at most, and a pause of REST_MS
        after a whole pass. `is_at_once` ignores the pace, for a worker that has just found a loss.

        """
        survey = survey_call(
            self.keys,
            count=OPEN_PER_TURN,
            pause_ms=TURN_MS,
            rest_ms=REST_MS,
            is_at_once=is_at_once,
        )
        # An id is UTF-8 text. Any other field of the hash is not a request.
        names = [row.decode(errors="ignore") for row in self._scripts.run("survey", survey)]
        replies = self._run_on([name for name in names if name], "restore", restore_call)
        # A damaged request was ended instead, and its reply is a state.
        return [
            Restored(request_id, Lost(lost)) for request_id, lost in replies if lost in set(Lost)
        ]

    def rank_anew(self) -> list[Restored]:
        """Ranks the requests that wait by a policy that was just announced: the first MAX_RANKED.

        The others are ranked by later turns of `restore`. Returns what that has restored, too.
        """
        number = self._read(command("hlen", self.keys.open))
        # A turn goes through OPEN_PER_TURN slots of a hash table, of which half may be empty.
        turns = range(2 * min(int(number), MAX_RANKED) // OPEN_PER_TURN + 1)
        return [restored for _ in turns for restored in self.restore(is_at_once=True)]

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

    def _run_on(
        self,
        request_ids: Sequence[str],
        transition: str,
        call: Callable[[Keys, Sequence[str]], ScriptCall],
    ) -> Iterator[tuple[str, str]]:
        """Runs a transition on many requests; the replies that are not empty."""
        for part in in_parts(request_ids):
            try:
                replies = self._scripts.run(transition, call(self.keys, part))
            except ProtocolError as error:
                replies = self._move_alone(transition, call, part, error=error)
            for request_id, reply in zip(part, replies, strict=True):
                if reply:
                    yield request_id, reply.decode()

    def _ids_in(self, times: str, rows: Sequence[bytes]) -> list[str]:
        """The requests in a sorted set. Removes members that are not ids."""
        ids: list[str] = []
        for row in rows:
            try:
                ids.append(row.decode())
            except UnicodeDecodeError:
                _log.error("not a request id, removed: %r in %s", row, times)
                self._retrying(partial(self.connection.zrem, times, row))
        return ids

    def _move_alone(
        self,
        transition: str,
        call: Callable[[Keys, Sequence[str]], ScriptCall],
        request_ids: Sequence[str],
        *,
        error: ProtocolError,
    ) -> list[bytes]:
        """Moves requests one by one, because at least one is damaged. The damaged ones end.

        Each is checked for damage before it is moved, for two reasons: many damaged requests would
        block all others for ever, and the failed call may have changed a damaged request so that
        the transition now skips it. Requests that the failed call has moved are not in the result.
        """
        states: list[bytes] = []
        for request_id in request_ids:
            if condemn(
                self._scripts, self.keys, transition=transition, request_id=request_id, error=error
            ):
                states.append(State.FAILED.encode())
                continue
            try:
                states += self._scripts.run(transition, call(self.keys, [request_id]))
            except ProtocolError as still:
                _log.error("%s of %s: %s", transition, request_id, still)
                states.append(b"")
        return states
