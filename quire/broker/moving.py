"""Keeps a queue moving: takes back what dead workers hold, queues what is due, ends what is late.

It is nobody's work in particular: any worker or operator may look for requests whose time has come.
The transition looks again, so that several who look at once move each request once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from quire.broker.damage import condemn
from quire.broker.shard import Shard
from quire.errors import ProtocolError
from quire.keys import Keys
from quire.transitions.calls import (
    MAX_ITEMS_PER_CALL,
    expire_call,
    in_parts,
    promote_call,
    reap_call,
    restore_call,
    survey_call,
)
from quire.transitions.values import Expired, Lost, Promoted, Reaped, Restored
from quire.transport.procedure import command
from quire.transport.script_runner import Call
from quire.wire.output import State

#: How many open requests one turn of `restore` looks at, or a few more: four calls of RESTORE, and
#: about 20 ms of the server.
OPEN_PER_TURN = 1000

#: The shortest time between two turns of `restore`, whoever takes them: 0.5 % of the server.
TURN_MS = 4000

#: The time from the end of one pass over all open requests to the beginning of the next one.
REST_MS = 30_000

_log = logging.getLogger(__name__)


class Moving(Shard):
    """The side of a Broker that moves on requests whose time has come."""

    def reap(self, *, limit: int = MAX_ITEMS_PER_CALL) -> list[Reaped]:
        """Takes requests from workers whose leases expired; any worker may call it at any time.

        Each is queued again, its tokens kept, or ended when it was cancelled, is past its deadline
        or has spent its attempts (a dead letter then). A claim that has published tokens is not
        counted as an attempt. A request with tokens goes before the others of its class. At most
        `limit`, oldest lease first.
        """
        return [
            Reaped(*moved)
            for moved in self._move("reap", reap_call, times=self.keys.lease, limit=limit)
        ]

    def promote(self, *, limit: int = MAX_ITEMS_PER_CALL, ends_late: bool = True) -> list[Promoted]:
        """Queues the scheduled requests that are due, and ends waiting ones that are late.

        Any worker may call it at any time. At most `limit` of each, the longest due first. Returns
        those that were due; to learn the late ones as well, pass `ends_late=False` and call
        `expire`.
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

        A claim would end them, too, but a busy or paused queue claims nothing. Any worker or
        operator may call it at any time. At most `limit`, the longest overdue first.
        """
        return [
            Expired(*moved)
            for moved in self._move("expire", expire_call, times=self.keys.wait, limit=limit)
        ]

    def restore(self, *, is_at_once: bool = False) -> list[Restored]:
        """One turn of comparing the open requests with the streams and sets that hold them.

        Streams can be trimmed or deleted, and keys evicted; then nobody would look at a request
        any more. It gets back what was lost. Any worker may call it at any time. A turn looks at
        the next OPEN_PER_TURN open requests. All workers share one place, and take a turn every
        TURN_MS at most; after a whole pass there is a rest. `is_at_once` does not wait for that:
        it is for one that has just found something.
        """
        survey = survey_call(
            self.keys,
            count=OPEN_PER_TURN,
            pause_ms=TURN_MS,
            rest_ms=REST_MS,
            is_at_once=is_at_once,
        )
        # An id is text; what else somebody wrote among the open requests is no request.
        names = [row.decode(errors="ignore") for row in self._scripts.run("survey", survey)]
        replies = self._run_on([name for name in names if name], "restore", restore_call)
        # A damaged one has ended instead.
        return [
            Restored(request_id, Lost(lost)) for request_id, lost in replies if lost in set(Lost)
        ]

    def _move(
        self,
        transition: str,
        call: Callable[[Keys, Sequence[str]], Call],
        *,
        times: str,
        limit: int,
    ) -> Iterator[tuple[str, State]]:
        """Runs a transition on the requests that are due by a sorted set of times."""
        now = self.now_ms()
        read = command("zrangebyscore", times, "-inf", now, start=0, num=limit)
        due = self._ids_in(times, self._read(read))
        # The script checks each time again, as it may have changed since.
        for request_id, state in self._run_on(due, transition, call):
            yield request_id, State(state)

    def _run_on(
        self,
        request_ids: Sequence[str],
        transition: str,
        call: Callable[[Keys, Sequence[str]], Call],
    ) -> Iterator[tuple[str, str]]:
        """Runs a transition on many requests; its answers but for the empty ones."""
        for part in in_parts(request_ids):
            try:
                replies = self._scripts.run(transition, call(self.keys, part))
            except ProtocolError as error:
                replies = self._move_alone(transition, call, part, error=error)
            for request_id, reply in zip(part, replies, strict=True):
                if reply:
                    yield request_id, reply.decode()

    def _ids_in(self, times: str, rows: Sequence[bytes]) -> list[str]:
        """The requests in a sorted set; a member that is no id is removed from it."""
        ids: list[str] = []
        for row in rows:
            try:
                ids.append(row.decode())
            except UnicodeDecodeError:
                _log.error("no request has this id: %r in %s", row, times)
                self._retrying(partial(self._connection.zrem, times, row))
        return ids

    def _move_alone(
        self,
        transition: str,
        call: Callable[[Keys, Sequence[str]], Call],
        request_ids: Sequence[str],
        *,
        error: ProtocolError,
    ) -> list[bytes]:
        """Moves requests one by one, at least one of which is damaged: the damaged ones end.

        Each is checked for damage before it is moved: enough damaged ones would block all others
        for ever, and the failed call may have changed it so that the transition passes it over now.
        What the failed call has moved already is missing from the result.
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
