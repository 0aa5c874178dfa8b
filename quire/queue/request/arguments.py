"""Keys and arguments that the scripts of requests share, in the order in which they read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from quire.keys import Keys
from quire.transport.script_calls import Argument, ScriptCall
from quire.wire.arguments import MAX_SECONDS, MIN_KEPT_SECONDS
from quire.wire.output import Completion, ErrorInfo, FinishReason, State

#: The most items of one Lua call: two to three milliseconds of the server's one thread.
MAX_ITEMS_PER_CALL = 256

_Item = TypeVar("_Item")


def script_settings(
    *,
    lease_seconds: float,
    max_queue_seconds: float,
    retention_seconds: float,
    max_attempts: int,
    max_backlog: int | None,
) -> tuple[Argument, ...]:
    """The first arguments of every transition, as `common.lua` reads them. ValueError."""
    durations = (lease_seconds, max_queue_seconds, retention_seconds)
    if not all(MIN_KEPT_SECONDS <= one <= MAX_SECONDS for one in durations) or max_attempts < 1:
        names = "lease_seconds, max_queue_seconds and retention_seconds"
        limits = f"{MIN_KEPT_SECONDS} to {MAX_SECONDS}, and max_attempts at least 1"
        raise ValueError(f"{names} must be {limits}")
    return (
        *(int(seconds * 1000) for seconds in durations),
        max_attempts,
        max_backlog if max_backlog is not None else 0,
        *ENDINGS,
    )


def names_of(keys: Keys, request_ids: Iterable[str]) -> list[str]:
    """The keys of a worker's script on these requests."""
    names = list(keys.of_workers)
    for request_id in request_ids:
        names += keys.of_scripts(request_id)
    return names


def call_on(keys: Keys, request_ids: Sequence[str]) -> ScriptCall:
    """For a script whose arguments are the ids of some requests: reap, promote, restore."""
    return ScriptCall(names_of(keys, request_ids), request_ids)


def in_parts(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """The items in their order, in parts that one call may take."""
    for first in range(0, len(items), MAX_ITEMS_PER_CALL):
        yield items[first : first + MAX_ITEMS_PER_CALL]


def _ending(state: State, reason: FinishReason, *, code: str, message: str) -> bytes:
    # The id is never encoded: the key of the log says it.
    return Completion("", state, reason, error=ErrorInfo(code, message)).encode()


#: The terminal records that scripts write by themselves, when no worker is there to write one, in
#: the order in which `common.lua` reads them. Scripts see messages as opaque bytes. What differs
#: between two requests (attempts, times, metadata, tokens) is stamped beside them and not inside.
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
