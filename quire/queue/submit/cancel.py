"""CANCEL and DISCARD: what a producer does with requests that it has submitted."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import InvalidRequest, UnknownRequest
from quire.keys import GROUP_SEPARATOR, Keys
from quire.queue.request.status import states_of
from quire.transport.procedure import Procedure
from quire.transport.script_calls import Ask, ScriptCall, raise_if_error
from quire.wire.output import State


def cancelling(keys: Keys, request_id: str) -> Procedure[State]:
    """See `Producer.cancel`."""
    (reply,) = yield Ask("cancel", [cancel_call(keys, request_id)])
    state = raise_if_error(reply)
    if not state:
        raise UnknownRequest(request_id)
    return State(state.decode())


def cancel_many(keys: Keys, request_ids: Sequence[str]) -> Procedure[dict[str, State]]:
    """See `Producer.cancel_many`."""
    replies = yield Ask("cancel", [cancel_call(keys, request_id) for request_id in request_ids])
    return states_of(request_ids, replies)


def discarding(keys: Keys, request_id: str) -> Procedure[State]:
    """See `Producer.discard`."""
    if GROUP_SEPARATOR in request_id:
        raise InvalidRequest("request_id", "must not be in a group, which has counts of its own")
    (reply,) = yield Ask("discard", [ScriptCall(keys.of_request(request_id), (request_id,))])
    state = raise_if_error(reply)
    if not state:
        raise UnknownRequest(request_id)
    return State(state.decode())


def cancel_call(keys: Keys, request_id: str) -> ScriptCall:
    """For cancel.lua."""
    return ScriptCall((*keys.of_producers, *keys.of_scripts(request_id)), (request_id,))
