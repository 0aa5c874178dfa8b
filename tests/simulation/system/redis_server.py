"""A Redis in memory that runs the shipped Lua scripts, crashes, and loses its tail.

Commands and types are redis_commands.py and redis_streams.py; the Lua is the real one, version 5.1
as in Redis. What is written to disk is a copy of the database at some moment; a crash that loses
the tail brings that copy back. The scripts it was told are forgotten at every restart.

Why not the fake there is: a COMMIT of one item takes it 670 microseconds, and a real
server 120; here it is 100, all in one process, and time stands still meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from lupa import lua51

from tests.simulation.system.redis_data import Database, ReplyError, Status
from tests.simulation.system.redis_streams import StreamCommands

#: Words of the wire that are no names in Python.
_RENAMED = {b"DEL": "del_"}

_NOT_COMMANDS = {"value", "typed", "made", "remove", "drop_if_empty", "now_ms", "stream_grew"}

#: Binds one script to its arguments; the call is that of the server which runs it now.
_PRELUDE = """
local bridge, failed = ...
redis = {
  call = function(...) return bridge(...) end,
  pcall = function(...)
    local reply = failed(...)
    return reply
  end,
  error_reply = function(text) return { err = text } end,
  status_reply = function(text) return { ok = text } end,
}
"""


class RedisServer(StreamCommands):
    """One server. `clock` gives unix microseconds; `on_growth` hears of every entry added."""

    def __init__(self, clock: Callable[[], int], *, on_growth: Callable[[], None]) -> None:
        super().__init__(clock)
        self._on_growth = on_growth
        self._scripts: dict[bytes, str] = {}
        self._disk = Database()
        #: What a test puts in the place of a text in every script, to break it.
        self.sabotage: Mapping[str, str] = {}
        self.is_up = True
        self.incarnation = 0

    def execute(self, arguments: list[bytes]) -> Any:
        """Runs one command. ReplyError."""
        word = arguments[0].upper()
        if word == b"EVALSHA":
            source = self._scripts.get(arguments[1])
            if source is None:
                raise ReplyError("NOSCRIPT No matching script. Please use EVAL.")
            return self._run(source, arguments[2:])
        if word == b"EVAL":
            source = arguments[1].decode()
            self._scripts[_sha(source)] = source
            return self._run(source, arguments[2:])
        if word == b"SCRIPT":
            source = arguments[2].decode()
            self._scripts[_sha(source)] = source
            return _sha(source)
        return self._command(arguments)

    def stream_grew(self) -> None:
        self._on_growth()

    def write_to_disk(self) -> None:
        """What is here now outlives a crash."""
        self._disk = self.database.copy()

    def stop(self) -> None:
        """Nothing is answered any more."""
        self.is_up = False
        self.incarnation += 1

    def start(self, *, loses_tail: bool) -> None:
        """Comes back, with everything or with what was on disk."""
        if loses_tail:
            self.database = self._disk.copy()
        self._scripts.clear()
        self.is_up = True

    def script_name(self, arguments: list[bytes]) -> str:
        """The transition an EVALSHA or EVAL runs, as its text names it; empty for others."""
        word = arguments[0].upper()
        if word == b"EVALSHA":
            return _name_of(self._scripts.get(arguments[1], ""))
        return _name_of(arguments[1].decode()) if word == b"EVAL" else ""

    def _command(self, arguments: list[bytes]) -> Any:
        word = arguments[0]
        method = _METHODS.get(word) or _METHODS.get(word.upper())
        if method is None:
            raise ReplyError(f"ERR unknown command '{word.decode()}'")
        try:
            return method(self, *arguments[1:])
        except TypeError as error:
            raise ReplyError(f"ERR wrong number of arguments for '{word.decode()}'") from error

    def _run(self, source: str, arguments: list[bytes]) -> Any:
        for old, new in self.sabotage.items():
            source = source.replace(old, new)
        num_keys = int(arguments[0])
        keys, values = arguments[1 : 1 + num_keys], arguments[1 + num_keys :]
        run = _compiled(source)
        _bridge.server = self
        try:
            return _reply(run(_lua().table_from(keys), _lua().table_from(values)))
        except lua51.LuaError as error:
            raise ReplyError(f"ERR Error running script: {error}") from error


class _Bridge:
    """Carries the calls of a script to the server that runs it."""

    server: RedisServer

    def call(self, *arguments: Any) -> Any:
        return _lua_value(self.server._command([_text(part) for part in arguments]))

    def failed(self, *arguments: Any) -> Any:
        try:
            return self.call(*arguments)
        except ReplyError as error:
            return _lua().table_from({b"err": str(error).encode()})


_bridge = _Bridge()


@cache
def _lua() -> Any:
    """One interpreter for all servers of the process: they have state, and it has none."""
    runtime = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True)
    runtime.execute(_PRELUDE.encode(), _bridge.call, _bridge.failed)
    return runtime


@cache
def _compiled(source: str) -> Any:
    text = f"return function(KEYS, ARGV)\n{source}\nend"
    return _lua().execute(text.encode())


@cache
def _sha(source: str) -> bytes:
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest().encode()


@cache
def _name_of(source: str) -> str:
    """A transition's own part begins with `-- NAME:`; it is the last such line."""
    names = [
        line[3:].partition(":")[0]
        for line in source.splitlines()
        if line.startswith("-- ") and line[3:].partition(":")[0].isupper() and ":" in line
    ]
    return names[-1].lower() if names else ""


def _text(value: Any) -> bytes:
    """An argument of redis.call as Redis takes it from Lua."""
    if type(value) is bytes:
        return value
    if isinstance(value, float):
        return b"%d" % int(value) if value.is_integer() else b"%.17g" % value
    assert isinstance(value, int), f"a script passes {value!r} to a command"
    return b"%d" % value


def _lua_value(reply: Any) -> Any:
    """A reply as a script sees it."""
    kind = type(reply)
    if kind is bytes or kind is int:
        return reply
    if reply is None:
        return False
    if kind is Status:
        return _lua().table_from({b"ok": bytes(reply)})
    return _lua().table_from([_lua_value(part) for part in reply])


def _reply(value: Any) -> Any:
    """What a script returned, as a client sees it."""
    kind = type(value)
    if kind is bytes or kind is int:
        return value
    if value is None or value is False:
        return None
    if value is True:
        return 1
    if kind is float:
        return int(value)
    if (error := value[b"err"]) is not None:
        raise ReplyError(error.decode())
    if (status := value[b"ok"]) is not None:
        return Status(status)
    parts, index = [], 1
    while (part := value[index]) is not None:
        parts.append(_reply(part))
        index += 1
    return parts


_METHODS: dict[bytes, Callable[..., Any]] = {
    name.rstrip("_").upper().encode(): getattr(StreamCommands, name)
    for name in dir(StreamCommands)
    if not name.startswith("_") and name not in _NOT_COMMANDS
}
