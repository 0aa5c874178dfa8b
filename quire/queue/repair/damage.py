"""CONDEMN ends requests with damaged keys.

Such keys contain what no transition wrote, so every transition on them fails. If the request
stayed, it would be tried again for ever and hold up all others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from quire.errors import ProtocolError, QuireError
from quire.keys import Keys
from quire.queue.request.arguments import in_parts, names_of
from quire.queue.shard import Shard
from quire.transport.script_calls import ScriptCall
from quire.wire.output import Completion, ErrorInfo, FinishReason, State

#: The longest reason stored with a dead letter, in characters.
MAX_REASON_LENGTH = 500

_log = logging.getLogger(__name__)


class Mending(Shard):
    """Runs transitions on requests of which some may be damaged; these end."""

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
            if self._condemn(transition, request_id, error=error):
                states.append(State.FAILED.encode())
                continue
            try:
                states += self._scripts.run(transition, call(self.keys, [request_id]))
            except ProtocolError as still:
                _log.error("%s of %s: %s", transition, request_id, still)
                states.append(b"")
        return states

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

    def _condemn(self, transition: str, request_id: str, *, error: ProtocolError) -> bool:
        """Ends a request on which a transition always fails. False if its keys are not damaged.

        `error` is the error of the transition. An error of this call itself is logged and not
        raised; then the request stays.
        """
        info = ErrorInfo("damaged", "the keys of the request in the queue are damaged")
        done = Completion(request_id, State.FAILED, FinishReason.ERROR, error=info).encode()
        reason = f"{info.code}: {error}"[:MAX_REASON_LENGTH]
        call = condemn_call(self.keys, request_id, reason=reason, done=done)
        try:
            ended = bool(self._scripts.run("condemn", call))
        except QuireError as worse:
            # Not raised: the caller needs the results of the other requests of the same call.
            _log.error("condemn of %s: %s", request_id, worse)
            return False
        if ended:
            _log.error("%s of %s failed, and it has ended: %s", transition, request_id, error)
        return ended


def condemn_call(keys: Keys, request_id: str, *, reason: str, done: bytes) -> ScriptCall:
    """For condemn.lua."""
    return ScriptCall(names_of(keys, [request_id]), (request_id, reason, done))
