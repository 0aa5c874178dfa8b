"""A sentinel for tests, which looks after one master under the name `shop`."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import redis

from quire.transport.local_redis import _free_port
from tests.quire.waiting import eventually

#: A master that a busy machine keeps from answering is not down: failovers are asked for.
NEVER_DOWN_MS = 60_000
PORT_ATTEMPTS = 5


@contextlib.contextmanager
def started_sentinel(folder: Path, master_port: int | str, *options: str) -> Iterator[int]:
    """A sentinel that decides alone. Yields its port."""
    lines = [f"dir {folder}", *options]
    lines += [f"sentinel monitor shop 127.0.0.1 {master_port} 1"]
    lines += [f"sentinel down-after-milliseconds shop {NEVER_DOWN_MS}"]
    # A failover that is asked for has as long for its steps as a busy machine may need. One that
    # the sentinel begins by itself is tried again after twice this time.
    lines += [f"sentinel failover-timeout shop {NEVER_DOWN_MS}"]
    port, process = _on_a_free_port(folder, lines)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


def _on_a_free_port(folder: Path, lines: list[str]) -> tuple[int, subprocess.Popen[bytes]]:
    """Another process may take a free port before the sentinel does."""
    command = ["redis-server", str(folder / "sentinel.conf"), "--sentinel"]
    for _ in range(PORT_ATTEMPTS):
        port = _free_port()
        (folder / "sentinel.conf").write_text("\n".join([f"port {port}", *lines]) + "\n")
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        with redis.Redis(port=port) as asked:
            eventually(partial(_answers_or_ends, asked, process))
        if process.poll() is None:
            return port, process
    raise AssertionError("no sentinel could be started")


def _answers_or_ends(asked: redis.Redis, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        return True
    return bool(asked.info("server")["process_id"] == process.pid)


def replicas_known_to(sentinel: redis.Redis) -> int:
    """How many replicas the sentinel has found, whose link to the master is up."""
    replicas = sentinel.sentinel_slaves("shop")
    return len([r for r in replicas if r["master-link-status"] == "ok"])
