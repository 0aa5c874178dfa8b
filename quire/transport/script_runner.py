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
    AskError,
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
from quire.transport.shared_connection import Sent, SharedConnection

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

#: Error replies after which a call is repeated.
_AGAIN = (*TRANSIENT, NoScriptError, AskError)

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


@dataclass(frozen=True, slots=True)
class Begun:
    """Calls of one transition that were sent, and whose replies were not read yet."""

    name: str
    made: Sequence[ScriptArguments]
    shared: SharedConnection
    sent: Sent


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
        return [script_error(r) if isinstance(r, RedisError) else r for r in replies]

    def run_as_made(self, name: str, calls: Iterator[ScriptCall]) -> list[Any]:
        """Like `run_many`, but sends each call at once, so that it runs while the next is made."""
        made: list[ScriptArguments] = []

        def commands() -> Iterator[ScriptArguments]:
            for call in calls:
                made.append(arguments_of(call, self._settings))
                yield made[-1]

        sending = commands()
        replies = self._send_as_made(self._load(name), sending)
        # Make the calls that were not made yet when sending failed. `commands` adds them to `made`.
        for _ in sending:
            pass
        return self._settled(name, made, replies)

    def begin(self, name: str, calls: Iterator[ScriptCall], shared: SharedConnection) -> Begun:
        """Sends each call as it is made; `finish` reads the replies."""
        made: list[ScriptArguments] = []
        sha = script_sha(self._load(name))

        def commands() -> Iterator[tuple[Argument, ...]]:
            for call in calls:
                num_keys, values = arguments_of(call, self._settings)
                made.append((num_keys, values))
                yield ("EVALSHA", sha, num_keys, *values)

        return Begun(name, made, shared, shared.send(commands()))

    def finish(self, begun: Begun) -> list[Any]:
        """The replies to these calls, as `run_as_made` returns them."""
        replies = [*map(of_its_kind, begun.shared.read(begun.sent))]
        return self._settled(begun.name, begun.made, replies)

    def _settled(self, name: str, made: Sequence[ScriptArguments], replies: list[Any]) -> list[Any]:
        if len(replies) < len(made) or any(isinstance(r, _AGAIN) for r in replies):
            replies = self._retrying(partial(self._pipeline, name, made, None))
        return [script_error(r) if isinstance(r, RedisError) else r for r in replies]

    def _send_as_made(self, source: str, commands: Iterable[ScriptArguments]) -> list[Any]:
        """The replies, including errors; fewer than commands if sending failed."""
        pool, sha = self._connection.connection_pool, script_sha(source)
        replies: list[Any] = []
        # redis-py has no types for it.
        connection: Any = None
        is_whole = False
        try:
            num_sent = 0
            for num_keys, values in commands:
                connection = connection or pool.get_connection()
                connection.send_command("EVALSHA", sha, num_keys, *values)
                num_sent += 1
            for _ in range(num_sent):
                try:
                    replies.append(connection.read_response())
                except ResponseError as error:
                    replies.append(of_its_kind(error))
            is_whole = True
        except RedisError:
            # The caller sends again, and that decides whether the error lasts.
            return []
        finally:
            if connection:
                if not is_whole:
                    # Another caller must not read the remaining replies.
                    connection.disconnect()
                pool.release(connection)
        return replies

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


def raise_if_error(reply: Any) -> Any:
    """The reply; raises it if it is an error in the list of `run_many`."""
    if isinstance(reply, QuireError):
        raise reply
    return reply


@cache
def script_sha(source: str) -> str:
    """The hash by which Redis names a script; it is not used for security."""
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
