"""Loads the Lua transitions and runs them by hash, falling back when the server forgot them.

Every transition is idempotent, so a call whose reply was lost is simply made again (see
`Retrying`). The source that runs is that of the shared parts followed by the transition's own file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import Any

import redis
from redis.exceptions import (
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from quire.errors import ProtocolError, QuireError
from quire.transport.connection import TRANSIENT, Retrying, translated
from quire.transport.durability import DurabilityRules
from quire.transport.procedure import Procedure, RoundTrip, command, run, send

Argument = str | bytes | int

#: What EVALSHA takes after the hash: the number of keys, then keys, settings and arguments.
ScriptArguments = tuple[int, tuple[Argument, ...]]

#: The shared parts that come before the text of a transition.
_PARTS = ("common", "request", "running")

#: Transitions that take fewer of them, because they may be called by those who touch fewer keys.
_PARTS_OF = {
    "submit": _PARTS[:2],
    "cancel": _PARTS[:2],
    "expire": _PARTS[:2],
    "extend": _PARTS[:1],
    "beat_worker": _PARTS[:1],
    "survey": _PARTS[:1],
}

#: What an error reply to a script says when it is about the server, or about what its user may do,
#: and so may be mended without us. Every other one is about the script and what it found.
_OF_THE_SERVER = re.compile(
    r"\b(BUSY|CLUSTERDOWN|LOADING|MASTERDOWN|MISCONF|NOAUTH|NOPERM|NOREPLICAS|OOM|READONLY"
    r"|UNKILLABLE)\b|The user executing the script|ACL failure in script|DB index is out of range"
)

#: How Redis 6.2 tells what a command in a script was refused for, of which redis-py knows nothing.
_OF_A_COMMAND = re.compile(r": -(OOM|READONLY) ")
_KINDS = {"OOM": OutOfMemoryError, "READONLY": ReadOnlyError}

#: Error replies after which a call is made again.
_AGAIN = (*TRANSIENT, NoScriptError)

#: The most calls sent in one pipeline, and the most bytes of more than one call: a bound on the
#: memory of both sides, and on how long the last call waits for its answer.
MAX_CALLS_PER_PIPELINE = 256
MAX_BYTES_PER_PIPELINE = 1 << 23


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a transition: all keys it touches, and its arguments after the settings."""

    keys: Sequence[str]
    arguments: Sequence[Argument]


class ScriptRunner:
    """Runs transitions on one server, with the broker's settings before each call's arguments.

    `sources` replaces the shipped text of a transition; the tests break one on purpose with it.
    """

    def __init__(
        self,
        connection: redis.Redis,
        settings: Sequence[Argument],
        *,
        retrying: Retrying,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self._connection = connection
        self._settings = tuple(settings)
        self._retrying = retrying
        self._sources = sources or {}

    def run(self, name: str, call: Call) -> Any:
        """Runs one transition and returns its reply.

        BrokerUnavailable, QueueFull, or ProtocolError, see `script_error`.
        """
        source = self._sources.get(name) or load_source(name)
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
        self, name: str, calls: Iterable[Call], *, durability: DurabilityRules | None = None
    ) -> list[Any]:
        """Runs many calls in few round trips; each is atomic, all of them together are not.

        The result of a call that failed alone is its error, as a QuireError in the list. With
        `durability` it returns when all is on disk, or raises DurabilityUnavailable before anything
        is sent.
        """
        if durability:
            self._retrying(lambda: run(durability.probing(), self._send))
        replies: list[Any] = []
        for part in pipelines_of(calls):
            made = [arguments_of(call, self._settings) for call in part]
            replies += self._retrying(partial(self._pipeline, name, made, durability))
        return [script_error(r) if isinstance(r, RedisError) else r for r in replies]

    def run_as_made(self, name: str, calls: Iterator[Call]) -> list[Any]:
        """Like `run_many`: sends each call when it is made, to be run while the next is made."""
        made: list[ScriptArguments] = []

        def commands() -> Iterator[ScriptArguments]:
            for call in calls:
                made.append(arguments_of(call, self._settings))
                yield made[-1]

        sending = commands()
        replies = self._send_as_made(self._sources.get(name) or load_source(name), sending)
        # Those that were not made yet when the sending failed. They note themselves, so that adding
        # them here, too, would make each of them twice.
        for _ in sending:
            pass
        if len(replies) < len(made) or any(isinstance(r, _AGAIN) for r in replies):
            replies = self._retrying(partial(self._pipeline, name, made, None))
        return [script_error(r) if isinstance(r, RedisError) else r for r in replies]

    def _send_as_made(self, source: str, commands: Iterable[ScriptArguments]) -> list[Any]:
        """The replies, errors among them; fewer than there are commands when sending failed."""
        pool, sha = self._connection.connection_pool, script_sha(source)
        replies: list[Any] = []
        # What it is made of has no types of its own.
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
            # Whether it may pass is found out by those who send again.
            return []
        finally:
            if connection:
                if not is_whole:
                    # Nobody else may read what is still to come.
                    connection.disconnect()
                pool.release(connection)
        return replies

    def _pipeline(
        self, name: str, made: Sequence[ScriptArguments], durability: DurabilityRules | None
    ) -> list[Any]:
        source = self._sources.get(name) or load_source(name)
        return run(sending(source, made, durability), self._send)

    def _send(self, trip: RoundTrip) -> list[Any]:
        return send(self._connection, trip)


def arguments_of(call: Call, settings: Sequence[Argument]) -> ScriptArguments:
    """What EVALSHA takes for this call, with the settings that every call begins with."""
    return len(call.keys), (*call.keys, *settings, *call.arguments)


def sending(
    source: str, made: Sequence[ScriptArguments], durability: DurabilityRules | None
) -> Procedure[list[Any]]:
    """Sends calls of one script in one pipeline, and loads the script where the server forgot it.

    The result of a call that failed alone is its error. Raises a transient error: all calls may be
    made again. With `durability`, DurabilityUnavailable or BrokerUnavailable unless all is on disk.
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


def pipelines_of(calls: Iterable[Call]) -> Iterator[list[Call]]:
    """The calls in their order, in parts that may each be sent in one pipeline."""
    part: list[Call] = []
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


@cache
def load_source(name: str) -> str:
    """The full text of the transition `name`."""
    folder = resources.files("quire.transport") / "scripts"
    files = (*_PARTS_OF.get(name, _PARTS), name)
    return "\n".join((folder / f"{file}.lua").read_text() for file in files)


def of_its_kind(reply: Any) -> Any:
    """What a script was answered with; an error as the one that Redis 7 and later tell."""
    if type(reply) is ResponseError and (found := _OF_A_COMMAND.search(str(reply))):
        return _KINDS[found[1]](str(reply))
    return reply


def is_lasting(error: RedisError) -> bool:
    """Whether a script that failed like this would fail again, however often it is called."""
    return type(error) is ResponseError and not _OF_THE_SERVER.search(str(error))


def script_error(error: RedisError) -> QuireError:
    """Our error for one that a call of a script was answered with; see `connection.translated`.

    ProtocolError for one that lasts: the keys do not hold what the scripts write there.
    """
    if not is_lasting(error):
        return translated(error)
    ours = ProtocolError(f"a transition failed, and would fail again: {error}")
    ours.__cause__ = error
    return ours


def raise_if_error(reply: Any) -> Any:
    """The reply, unless it is one of the errors `run_many` leaves in its list."""
    if isinstance(reply, QuireError):
        raise reply
    return reply


@cache
def script_sha(source: str) -> str:
    """The hash by which Redis names a script; nothing secret depends on it."""
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
