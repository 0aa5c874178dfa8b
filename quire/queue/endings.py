"""The terminal records the broker writes by itself, when no worker is there to write one.

The scripts take them ready-made: they see messages as opaque bytes. What differs between two
requests (attempts, times, metadata, tokens) is stamped beside them and not inside.
"""

from __future__ import annotations

from quire.wire.output import Completion, ErrorInfo, FinishReason, State


def _ending(state: State, reason: FinishReason, *, code: str, message: str) -> bytes:
    # The id is never encoded: the key of the log says it.
    return Completion("", state, reason, error=ErrorInfo(code, message)).encode()


#: In the order in which `common.lua` reads them.
ENDINGS: tuple[bytes, ...] = (
    _ending(
        State.CANCELLED,
        FinishReason.CANCELLED,
        code="cancelled",
        message="the request was cancelled",
    ),
    _ending(
        State.EXPIRED,
        FinishReason.DEADLINE,
        code="deadline_exceeded",
        message="the deadline passed before the request was complete",
    ),
    _ending(
        State.EXPIRED,
        FinishReason.DEADLINE,
        code="queue_timeout",
        message="the request waited in the queue for longer than the queue allows",
    ),
    _ending(
        State.FAILED,
        FinishReason.ERROR,
        code="attempts_spent",
        message="every attempt ended with the loss of its worker",
    ),
)
