"""Calls of Lua transitions: their arguments, their pipelines, and what an error reply means."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from redis.exceptions import (
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from quire.errors import ProtocolError, QuireError
from quire.transport.connection import TRANSIENT, translated
from quire.transport.procedure import Procedure, RoundTrip, command

if TYPE_CHECKING:
    from quire.transport.durability import DurabilityRules

Argument = str | bytes | int

#: What EVALSHA takes after the hash: the number of keys, then keys, settings and arguments.
ScriptArguments = tuple[int, tuple[Argument, ...]]

#: Error replies about the server, or about the rights of the user, which may be resolved outside
#: Quire. Every other error reply is about the script and the keys.
_OF_THE_SERVER = re.compile(
    r"\b(BUSY|CLUSTERDOWN|LOADING|MASTERDOWN|MISCONF|NOAUTH|NOPERM|NOREPLICAS|OOM|READONLY"
    r"|UNKILLABLE)\b|The user executing the script|ACL failure in script|DB index is out of range"
)

#: The format of Redis 6.2 for the error of a command in a script, which redis-py does not parse.
_OF_A_COMMAND = re.compile(r": -(OOM|READONLY) ")
_KINDS = {"OOM": OutOfMemoryError, "READONLY": ReadOnlyError}

#: The most calls in one pipeline, and the most bytes if there are several. Limits the memory of
#: both sides, and how long the last call waits for its reply.
MAX_CALLS_PER_PIPELINE = 256
MAX_BYTES_PER_PIPELINE = 1 << 23


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """One call of a transition: all its keys, and its arguments after the settings."""

    keys: Sequence[str]
    arguments: Sequence[Argument]


@dataclass(frozen=True, slots=True)
class Ask:
    """The step of a procedure that runs one transition; its result is that of `run_many`.

    `must_be_durable`: a durable queue waits for the disk, because the caller relies on the effect.
    """

    transition: str
    calls: Sequence[ScriptCall]
    must_be_durable: bool = False


def arguments_of(call: ScriptCall, settings: Sequence[Argument]) -> ScriptArguments:
    """What EVALSHA takes for this call."""
    return len(call.keys), (*call.keys, *settings, *call.arguments)


def sending(
    source: str, made: Sequence[ScriptArguments], durability: DurabilityRules | None
) -> Procedure[list[Any]]:
    """Sends calls of one script in one pipeline; loads the script if the server does not have it.

    If a call fails alone, its error is in the result. A transient error is raised, because all
    calls may be repeated. With `durability`, DurabilityUnavailable or BrokerUnavailable unless all
    is on disk.
    """
    sha = script_sha(source)
    commands = [command("evalsha", sha, num_keys, *values) for num_keys, values in made]
    if durability:
        commands.append(durability.add_wait)
    trip = RoundTrip(tuple(commands), keeps_errors=True)
    replies = _judged((yield trip), len(made), durability)
    if any(isinstance(reply, NoScriptError) for reply in replies):
        yield RoundTrip((command("script_load", source),))
        replies = _judged((yield trip), len(made), durability)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            raise TryAgainError("the slot has moved to a node without the script")
    return replies


def _judged(
    replies: Iterable[Any], num_calls: int, durability: DurabilityRules | None
) -> list[Any]:
    found = [*map(of_its_kind, replies)]
    for reply in found:
        if isinstance(reply, TRANSIENT):
            raise reply
    if durability:
        durability.check(found[num_calls:])
    return found[:num_calls]


def pipelines_of(calls: Iterable[ScriptCall]) -> Iterator[list[ScriptCall]]:
    """The calls in order, in parts for one pipeline each."""
    part: list[ScriptCall] = []
    num_bytes = 0
    for call in calls:
        added = sum(len(value) for value in call.arguments if not isinstance(value, int))
        is_full = len(part) == MAX_CALLS_PER_PIPELINE or num_bytes + added > MAX_BYTES_PER_PIPELINE
        if part and is_full:
            yield part
            part, num_bytes = [], 0
        part.append(call)
        num_bytes += added
    if part:
        yield part


def of_its_kind(reply: Any) -> Any:
    """The reply of a script; an OOM or READONLY that Redis 6.2 wraps is as from Redis 7."""
    if type(reply) is ResponseError and (found := _OF_A_COMMAND.search(str(reply))):
        return _KINDS[found[1]](str(reply))
    return reply


def is_lasting(error: RedisError) -> bool:
    """Whether a script that failed with this error would fail each time."""
    return type(error) is ResponseError and not _OF_THE_SERVER.search(str(error))


def script_error(error: RedisError) -> QuireError:
    """The QuireError for an error reply of a script; see `connection.translated`.

    ProtocolError for a lasting one: the keys contain what no script wrote.
    """
    if not is_lasting(error):
        return translated(error)
    ours = ProtocolError(f"a transition failed, and would fail again: {error}")
    ours.__cause__ = error
    return ours


def or_error(reply: Any) -> Any:
    """The reply; of an error the QuireError."""
    return script_error(reply) if isinstance(reply, RedisError) else reply


def raise_if_error(reply: Any) -> Any:
    """The reply; raises it if it is an error in the list of `run_many`."""
    if isinstance(reply, QuireError):
        raise reply
    return reply


@cache
def script_sha(source: str) -> str:
    """The hash by which Redis names a script; it is not used for security."""
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
