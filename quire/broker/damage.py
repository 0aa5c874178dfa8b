"""Ends requests of which the queue holds what no transition wrote, so that every one fails on them.

Left as they are, they would come up again for ever, in the way of all others.
"""

from __future__ import annotations

import logging

from quire.errors import ProtocolError, QuireError
from quire.keys import Keys
from quire.transitions.calls import MAX_REASON_LENGTH, condemn_call
from quire.transitions.values import IngressEntry
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
    entry: IngressEntry | None = None,
) -> bool:
    """Ends a request on which a transition always fails. False if its keys are sound.

    `error` is what the transition failed with. A claim passes the `entry` it was made for, which is
    removed as well. An error of the call itself is logged and not raised; the request stays then.
    """
    info = ErrorInfo("damaged", "what the queue holds of the request is damaged")
    done = Completion(request_id, State.FAILED, FinishReason.ERROR, error=info).encode()
    reason = f"{info.code}: {error}"[:MAX_REASON_LENGTH]
    call = condemn_call(keys, request_id, entry=entry, reason=reason, done=done)
    try:
        ended = bool(scripts.run("condemn", call))
    except QuireError as worse:
        # Not raised: the caller must learn what became of the others of the same call.
        _log.error("condemn of %s: %s", request_id, worse)
        return False
    if ended:
        _log.error("%s of %s failed, and it has ended: %s", transition, request_id, error)
    return ended
