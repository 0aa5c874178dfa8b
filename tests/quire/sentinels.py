"""A sentinel for tests, which looks after one master under the name `shop`."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import redis

from quire.transport.local_redis import _free_port

#: A master that a busy machine keeps from answering is not down: failovers are asked for.
NEVER_DOWN_MS = 60_000


@contextlib.contextmanager
def started_sentinel(
    folder: Path, master_port: int | str, *options: str, down_after_ms: int = NEVER_DOWN_MS
) -> Iterator[int]:
    """A sentinel that decides alone. Yields its port."""
    port = _free_port()
    lines = [f"port {port}", f"dir {folder}", *options]
    lines += [f"sentinel monitor shop 127.0.0.1 {master_port} 1"]
    lines += [f"sentinel down-after-milliseconds shop {down_after_ms}"]
    lines += ["sentinel failover-timeout shop 5000"]
    (folder / "sentinel.conf").write_text("\n".join(lines) + "\n")
    command = ["redis-server", str(folder / "sentinel.conf"), "--sentinel"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


def replicas_known_to(sentinel: redis.Redis) -> int:
    """How many replicas the sentinel has found, whose link to the master is up."""
    replicas = sentinel.sentinel_slaves("shop")
    return len([r for r in replicas if r["master-link-status"] == "ok"])
