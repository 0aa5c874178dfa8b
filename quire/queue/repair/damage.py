"""Ends requests with damaged keys.

Such keys contain what no transition wrote, so every transition on them fails. If the request
stayed, it would be tried again for ever and hold up all others.
"""

from __future__ import annotations

import logging

from quire.errors import ProtocolError, QuireError
from quire.keys import Keys
from quire.queue.calls import MAX_REASON_LENGTH, condemn_call
from quire.transport.script_runner import ScriptRunner
from quire.wire.output import Completion, ErrorInfo, FinishReason, State

_log = logging.getLogger(__name__)


def condemn(
    scripts: ScriptRunner,
    keys: Keys,
    *,
    transition: str,
    request_id: str,
    error: ProtocolError,
) -> bool:
    """Ends a request on which a transition always fails. False if its keys are not damaged.

    `error` is the error of the transition. An error of this call itself is logged and not raised;
    then the request stays.

    """
    info = ErrorInfo("damaged", "the keys of the request in the queue are damaged")
    done = Completion(request_id, State.FAILED, FinishReason.ERROR, error=info).encode()
    reason = f"{info.code}: {error}"[:MAX_REASON_LENGTH]
    call = condemn_call(keys, request_id, reason=reason, done=done)
    try:
        ended = bool(scripts.run("condemn", call))
    except QuireError as worse:
        # Not raised: the caller needs the results of the other requests of the same call.
        _log.error("condemn of %s: %s", request_id, worse)
        return False
    if ended:
        _log.error("%s of %s failed, and it has ended: %s", transition, request_id, error)
    return ended
