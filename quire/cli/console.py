"""The output of the command: data on stdout, as text or JSON; progress and errors on stderr.

Also the flags that several verbs share, and the clients that are made from them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from quire.cli.sources import known_settings, misspelt_variables, with_password, without_password
from quire.cli.usage import without_secrets
from quire.client.client import DEFAULT_URL, Client
from quire.client.client_async import AsyncClient
from quire.errors import InvalidRequest
from quire.pictures import Terminal, in_one_line, raw
from quire.queue.side import Side
from quire.transport.connection import connect
from quire.wire.arguments import MAX_AHEAD_SECONDS, QueueSettings
from quire.wire.json_text import read_object
from quire.wire.json_values import plain
from quire.wire.protocol import MAX_REQUEST_ID_LENGTH, REQUEST_ID_PATTERN

#: The most names of a list that are printed.
MAX_NAMES = 4

_Client = TypeVar("_Client", Client, AsyncClient)
_Side = TypeVar("_Side", bound=Side)


@dataclasses.dataclass(slots=True)
class Console:
    """The output of one run of the command. `has_terminal`: stderr is a terminal."""

    is_json: bool = False
    has_terminal: bool = False
    has_color: bool = False
    _has_line: bool = False

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Console:
        """A console for these flags, the streams of the process, and NO_COLOR."""
        has_terminal = sys.stderr.isatty()
        has_color = has_terminal and not os.environ.get("NO_COLOR")
        return cls(getattr(arguments, "json", False), has_terminal, has_color)

    def data(self, value: Any, text: str | None = None) -> None:
        """Prints one record: as a line of JSON with --json or without `text`, else as `text`."""
        line = to_json(value) if self.is_json or text is None else text
        sys.stdout.write(line + "\n")

    def piece(self, text: str) -> None:
        """Prints a part of a line and flushes it."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def table(self, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Prints columns of text, each as wide as its longest cell."""
        # On a terminal, a cell with a line end could look like a row of its own.
        shown = in_one_line if isinstance(sys.stdout, Terminal) else str
        lines = [[shown(str(cell)) for cell in row] for row in (header, *rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            sys.stdout.write("  ".join(cells).rstrip() + "\n")

    def table_of_shards(
        self, header: Sequence[str], rows: Iterable[Sequence[object]], num_shards: int
    ) -> None:
        """The same for rows that begin with the number of a shard: without it if there is one."""
        first = 1 if num_shards == 1 else 0
        self.table(header[first:], [row[first:] for row in rows])

    def clear(self) -> None:
        """Clears the terminal, for what is printed in place."""
        raw(sys.stdout).write("\x1b[H\x1b[2J")

    def progress(self, text: str) -> None:
        """Replaces the progress line; prints nothing without a terminal."""
        if self.has_terminal:
            raw(sys.stderr).write("\r\x1b[2K")
            sys.stderr.write(text)
            sys.stderr.flush()
            self._has_line = True

    def end_progress(self) -> None:
        """Ends the progress line, so that the next output starts on a new line."""
        if self._has_line:
            sys.stderr.write("\n")
            self._has_line = False

    def note(self, text: str) -> None:
        """Prints a remark on stderr; prints nothing without a terminal."""
        if self.has_terminal:
            self.end_progress()
            sys.stderr.write(text + "\n")

    def drop_progress(self) -> None:
        """Removes the progress line, which says nothing any more."""
        if self._has_line:
            raw(sys.stderr).write("\r\x1b[2K")
            sys.stderr.flush()
            self._has_line = False

    def tell(self, text: str) -> None:
        """Prints a remark on stderr, with or without a terminal, in place of the progress line."""
        self.drop_progress()
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def complain(self, error: object) -> None:
        """Prints an error on stderr, with or without a terminal."""
        self.end_progress()
        raw(sys.stderr).write("\x1b[31merror:\x1b[0m" if self.has_color else "error:")
        sys.stderr.write(f" {error}\n")


class WarningHandler(logging.Handler):
    """Writes the warnings of the library to stderr, each as a line."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.end_progress()
        sys.stderr.write(f"{record.getMessage()}\n")


@contextlib.contextmanager
def printing_warnings(console: Console) -> Iterator[None]:
    """Inside this context the warnings of the library are printed, with or without a terminal."""
    log, handler = logging.getLogger("quire"), WarningHandler(console)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that every verb has."""
    parser.add_argument("--json", action="store_true", help="print JSON, one record per line")


def add_server(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name the queue. InvalidRequest for an invalid file of settings."""
    known = known_settings(os.environ)
    for clause in misspelt_variables(os.environ):
        sys.stderr.write(f"warning: {clause}\n")
    url = known.get("redis_url", DEFAULT_URL)
    help_ = "[QUIRE_REDIS_URL], its password [QUIRE_REDIS_PASSWORD]"
    parser.add_argument("--redis-url", default=url, metavar="URL", help=help_)
    parser.set_defaults(redis_password=known.get("redis_password"))
    queue = known.get("queue", "default")
    parser.add_argument("--queue", default=queue, metavar="NAME", help="[QUIRE_QUEUE or default]")
    help_ = "number of shards of the queue [QUIRE_SHARDS or 1]"
    shards = known.get("shards", "1")
    parser.add_argument("--shards", type=int, default=shards, metavar="N", help=help_)
    durations = {name: known[name] for name in _DURATIONS if name in known}
    parser.set_defaults(durations=durations)
    add_json(parser)


#: Settings of a queue that should be the same for its clients and its workers.
_DURATIONS = ("max_queue_seconds", "retention_seconds")


def an_id(text: str) -> str:
    """The type of an argument that is the id of a request.

    Refuses what looks like a url with a password, too: an id is repeated on the terminal.
    """
    is_id = len(text) <= MAX_REQUEST_ID_LENGTH and re.fullmatch(REQUEST_ID_PATTERN, text)
    if not is_id or without_secrets(text) != text:
        raise argparse.ArgumentTypeError(f"{text} is not the id of a request")
    return text


def not_negative(text: str) -> float:
    """The type of a flag that is a duration in seconds: 0 or more, cut to a year."""
    # With a ValueError, argparse would print the name of this function.
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    # Timeouts of the system fail for much longer durations.
    return min(seconds, MAX_AHEAD_SECONDS)


def json_map(text: str) -> dict[str, Any]:
    """The type of a flag that is a JSON object."""
    try:
        value, fault = read_object(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(error.message.removeprefix("is ")) from error
    if fault is not None:
        raise argparse.ArgumentTypeError(f"{fault.path}: {fault.message}")
    return value


def text_file(path: str) -> str:
    """The type of a flag that names a file; its value is the text of the file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def schema_file(path: str) -> dict[str, Any]:
    """The type of a flag that names a file with a JSON schema; its value is the schema."""
    return json_map(text_file(path))


def settings_of(arguments: argparse.Namespace) -> QueueSettings:
    """The durations of the queue that environment or file set. InvalidRequest for a wrong one."""
    settings = QueueSettings()
    try:
        if text := arguments.durations.get("max_queue_seconds"):
            settings["max_queue_seconds"] = float(text)
        if text := arguments.durations.get("retention_seconds"):
            settings["retention_seconds"] = float(text)
    except ValueError as error:
        raise InvalidRequest("max_queue_seconds, retention_seconds", str(error)) from error
    return settings


def sides_of(role: type[_Side], arguments: argparse.Namespace, **settings: Any) -> list[_Side]:
    """This role's side of all shards of the queue in `add_server`'s flags. InvalidRequest."""
    if arguments.shards < 1:
        raise InvalidRequest("shards", "must be at least 1")
    try:
        connection = connect(url_of(arguments))
        return [
            role(
                connection,
                queue=arguments.queue,
                shard=shard,
                **{**settings_of(arguments), **settings},
            )
            for shard in range(arguments.shards)
        ]
    except ValueError as error:
        raise InvalidRequest("redis-url or queue", str(error)) from error


def client_of(arguments: argparse.Namespace) -> Client:
    """A client of the queue in `add_server`'s flags. InvalidRequest for a wrong flag."""
    return _made(Client, arguments)


def async_client_of(arguments: argparse.Namespace) -> AsyncClient:
    """The same client for an event loop. InvalidRequest."""
    return _made(AsyncClient, arguments)


def of_shard(number: int, num_shards: int) -> str:
    """How a sentence about a shard begins: not at all if there is only one."""
    return f"shard {number}: " if num_shards > 1 else ""


def url_of(arguments: argparse.Namespace) -> str:
    """The server's url, with the password of environment or file unless the url has its own."""
    return with_password(arguments.redis_url, arguments.redis_password)


def flags_of(arguments: argparse.Namespace) -> str:
    """The flags that name this queue in another command line; empty if the defaults do.

    The url is without its password, because the terminal would keep it.
    """
    settings = known_settings(os.environ)
    flags = {
        "--redis-url": (arguments.redis_url, settings.get("redis_url", DEFAULT_URL)),
        "--queue": (arguments.queue, settings.get("queue", "default")),
        "--shards": (arguments.shards, settings.get("shards", "1")),
    }
    needed = {flag: str(value) for flag, (value, known) in flags.items() if str(value) != known}
    if "--redis-url" in needed:
        needed["--redis-url"] = without_password(needed["--redis-url"])
    return "".join(f" {flag} {shlex.quote(value)}" for flag, value in needed.items())


def _made(kind: Callable[..., _Client], arguments: argparse.Namespace) -> _Client:
    settings = settings_of(arguments)
    try:
        return kind(url_of(arguments), queue=arguments.queue, shards=arguments.shards, **settings)
    except ValueError as error:
        raise InvalidRequest("redis-url, queue or shards", str(error)) from error


def few(names: Sequence[str]) -> str:
    """All names, or the first MAX_NAMES and the number of the others."""
    shown = ", ".join(names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"


def to_json(value: Any) -> str:
    """One line of JSON for any of our records; in ASCII if stdout's encoding is not UTF."""
    is_utf = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    return json.dumps(plain(value), ensure_ascii=not is_utf, allow_nan=False)
