"""A sentinel for tests, which looks after one master under the name `shop`."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import redis

from tests.quire.servers import on_a_free_port, real_program

#: A master that a busy machine keeps from answering is not down: failovers are asked for.
NEVER_DOWN_MS = 60_000


@contextlib.contextmanager
def started_sentinel(folder: Path, master_port: int | str, *options: str) -> Iterator[int]:
    """A sentinel that decides alone. Yields its port."""
    lines = [f"dir {folder}", *options]
    lines += [f"sentinel monitor shop 127.0.0.1 {master_port} 1"]
    lines += [f"sentinel down-after-milliseconds shop {NEVER_DOWN_MS}"]
    # A failover that is asked for has as long for its steps as a busy machine may need. One that
    # the sentinel begins by itself is tried again after twice this time.
    lines += [f"sentinel failover-timeout shop {NEVER_DOWN_MS}"]

    def start(port: int) -> subprocess.Popen[bytes]:
        file = folder / "sentinel.conf"
        file.write_text("\n".join([f"port {port}", *lines]) + "\n")
        command = [real_program(), str(file), "--sentinel"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    port, process = on_a_free_port(start)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


def replicas_known_to(sentinel: redis.Redis) -> int:
    """How many replicas the sentinel has found, whose link to the master is up."""
    replicas = sentinel.sentinel_slaves("shop")
    return len([r for r in replicas if r["master-link-status"] == "ok"])
