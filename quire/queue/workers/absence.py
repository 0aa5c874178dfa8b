"""Why a request may wait for ever: no worker will take it.

Knows what the registry of the workers of a shard tells. Knows no connection.
"""

from __future__ import annotations

from collections.abc import Sequence

from redis.exceptions import RedisError

from quire.keys import Keys
from quire.queue.clock import ms_of
from quire.queue.workers.workers import WorkerInfo, workers_in
from quire.transport.procedure import Procedure, RoundTrip, command

#: The shard that every worker of a queue serves, unless its settings name only other shards.
FIRST_SHARD = 0


def absence(keys: Keys) -> Procedure[str | None]:
    """Why no worker takes a request now, as a clause; None if a worker may take it at any time.

    Also None if this Redis user may not read the registry; a producer may not. One round trip that
    reads a few small keys.
    """
    shards = [keys] if keys.shard == FIRST_SHARD else [keys, Keys(keys.queue, FIRST_SHARD)]
    reads = [command("time"), command("hget", keys.control, "paused")]
    reads += [command("hgetall", shard.workers) for shard in shards]
    time, paused, *registries = yield RoundTrip(tuple(reads), keeps_errors=True)
    if isinstance(time, RedisError):
        return None
    if isinstance(paused, bytes):
        reason = paused.decode(errors="replace")
        clause = f"{_name(keys)} is paused"
        return f"{clause} ({reason})" if reason else clause
    if any(isinstance(registry, RedisError) for registry in registries):
        return None
    own, *first = (workers_in(registry, now_ms=ms_of(time)) for registry in registries)
    return _reason(own, keys, elsewhere=first[0] if first else ())


def _reason(
    workers: Sequence[WorkerInfo], keys: Keys, *, elsewhere: Sequence[WorkerInfo]
) -> str | None:
    alive = [worker for worker in workers if worker.is_alive]
    if alive:
        if all(worker.is_draining for worker in alive):
            return f"every worker of {_name(keys)} drains, and takes nothing new"
        if all(worker.is_loading or worker.is_draining for worker in alive):
            first = next(worker for worker in alive if worker.is_loading)
            return f"{first.name} of {_name(keys)} still loads its model"
        return None
    others = [worker.name for worker in elsewhere if worker.is_alive]
    if others:
        return (
            f"no worker serves shard {keys.shard} of queue {keys.queue!r}, but {others[0]} serves "
            f"shard {FIRST_SHARD}: set the same number of shards for workers and clients"
        )
    if workers:
        last = min(workers, key=lambda worker: worker.seen_seconds)
        seen = f"{last.name} ({last.state}, {last.seen_seconds:.0f} s ago)"
        return f"no worker is alive on {_name(keys)}; the last one was {seen}"
    return f"no worker is alive on {_name(keys)}, and none was recently; is this the right queue?"


def _name(keys: Keys) -> str:
    name = f"queue {keys.queue!r}"
    return name if keys.shard == FIRST_SHARD else f"shard {keys.shard} of {name}"
