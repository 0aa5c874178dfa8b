"""EXPIRE ends a request that nobody runs and that has waited too long."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import QuireError
from quire.keys import Keys
from quire.queue.request.status import states_of
from quire.transport.procedure import Procedure
from quire.transport.script_calls import Ask, ScriptCall
from quire.wire.output import State


def end_overdue(keys: Keys, request_ids: Sequence[str]) -> Procedure[dict[str, State]]:
    """See `Producer.end_overdue`."""
    replies = yield Ask("expire", [expire_call(keys, [request_id]) for request_id in request_ids])
    # Each call is about one request, and its reply a list of one state.
    states = [reply if isinstance(reply, QuireError) else reply[0] for reply in replies]
    return states_of(request_ids, states)


def expire_call(keys: Keys, request_ids: Sequence[str]) -> ScriptCall:
    """For expire.lua."""
    names = [*keys.of_producers, keys.lease]
    for request_id in request_ids:
        names += keys.of_scripts(request_id)
    return ScriptCall(names, request_ids)
