"""Runs Lua transitions by hash; loads them again if the server lost them.

Every transition is idempotent, so a call whose reply was lost is repeated (see `Retrying`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import redis
from redis.exceptions import (
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from quire.errors import ProtocolError, QuireError
from quire.transport.connection import TRANSIENT, Retrying, translated
from quire.transport.durability import DurabilityRules
from quire.transport.procedure import Procedure, RoundTrip, command, run, send

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


class ScriptRunner:
    """Runs transitions on one server. The arguments of each call begin with `settings`.

    `load` returns the source of a transition by its name.
    """

    def __init__(
        self,
        connection: redis.Redis,
        settings: Sequence[Argument],
        *,
        load: Callable[[str], str],
        retrying: Retrying,
    ) -> None:
        self._connection = connection
        self._settings = tuple(settings)
        self._retrying = retrying
        self._load = load

    def run(self, name: str, call: ScriptCall) -> Any:
        """Runs one transition and returns its reply.

        BrokerUnavailable, QueueFull, or ProtocolError, see `script_error`.
        """
        source = self._load(name)
        num_keys, values = arguments_of(call, self._settings)

        def once() -> Any:
            try:
                return self._connection.evalsha(script_sha(source), num_keys, *values)
            except NoScriptError:
                return self._connection.eval(source, num_keys, *values)

        def judged() -> Any:
            try:
                return once()
            except ResponseError as error:
                if is_lasting(error):
                    raise script_error(error) from error
                raise of_its_kind(error) from None

        return self._retrying(judged)

    def run_many(
        self, name: str, calls: Iterable[ScriptCall], *, durability: DurabilityRules | None = None
    ) -> list[Any]:
        """Runs many calls in few round trips. Each is atomic; all of them together are not.

        If a call fails alone, its QuireError is in the list. With `durability` it returns when all
        is on disk, or raises DurabilityUnavailable before anything is sent.
        """
        if durability:
            self._retrying(lambda: run(durability.probing(), self._send))
        replies: list[Any] = []
        for part in pipelines_of(calls):
            made = [arguments_of(call, self._settings) for call in part]
            replies += self._retrying(partial(self._pipeline, name, made, durability))
        return [_own(reply) for reply in replies]

    @staticmethod
    def run_together(name: str, calls: Sequence[tuple[ScriptRunner, ScriptCall]]) -> list[Any]:
        """Runs one call for each of several shards of one server, in one round trip.

        If a call fails alone, its QuireError is in the list. Repeats nothing: BrokerUnavailable if
        not all were answered, for instance because a shard is at another node meanwhile.
        """
        first = calls[0][0]
        made = [arguments_of(call, runner._settings) for runner, call in calls]
        once = partial(first._pipeline, name, made, None)
        return [_own(reply) for reply in first._retrying(once, repeatable=False)]

    def _pipeline(
        self, name: str, made: Sequence[ScriptArguments], durability: DurabilityRules | None
    ) -> list[Any]:
        source = self._load(name)
        return run(sending(source, made, durability), self._send)

    def _send(self, trip: RoundTrip) -> list[Any]:
        return send(self._connection, trip)


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
    """The reply of a script; an error of Redis 6.2 becomes the one that Redis 7 would return."""
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


def _own(reply: Any) -> Any:
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
