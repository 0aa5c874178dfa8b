"""Why a request may be waiting for nothing: no worker is there that would take it.

Knows what one look at a shard and at the registry of its workers tells; the brokers look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from quire.keys import Keys
from quire.transitions.replies import ms_of, readable, worker_of
from quire.transitions.values import WorkerInfo

#: The shard that every worker of a queue signs on at, unless it is told to serve others only.
FIRST_SHARD = 0

#: The state of a worker that takes nothing new, since it is about to end.
_DRAINING = "draining"


def ask_absence(pipeline: Any, keys: Keys) -> None:
    """Adds the reads of one look: one round trip, a few small keys."""
    pipeline.time()
    pipeline.hget(keys.control, "paused")
    pipeline.hgetall(keys.workers)
    if keys.shard != FIRST_SHARD:
        pipeline.hgetall(Keys(keys.queue, FIRST_SHARD).workers)


def absence_in(replies: Sequence[Any], keys: Keys) -> str | None:
    """What is missing by these replies, as a clause; None if a worker may come at any moment.

    None also where this user may not look at the registry, as a producer may not.
    """
    time, paused, *registries = replies
    if isinstance(time, RedisError):
        return None
    if isinstance(paused, bytes):
        reason = paused.decode(errors="replace")
        told = f"{_name(keys)} is paused"
        return f"{told} ({reason})" if reason else told
    if any(isinstance(registry, RedisError) for registry in registries):
        return None
    own, *first = (_workers_in(registry, now_ms=ms_of(time)) for registry in registries)
    return _nobody(own, keys, elsewhere=first[0] if first else ())


def _nobody(
    workers: Sequence[WorkerInfo], keys: Keys, *, elsewhere: Sequence[WorkerInfo]
) -> str | None:
    alive = [worker for worker in workers if worker.is_alive]
    if alive:
        if all(worker.state == _DRAINING for worker in alive):
            return f"every worker of {_name(keys)} drains, and takes nothing new"
        return None
    others = [worker.name for worker in elsewhere if worker.is_alive]
    if others:
        return (
            f"nobody serves shard {keys.shard} of queue {keys.queue!r}, but {others[0]} serves "
            f"shard {FIRST_SHARD}: workers and clients must be given the same number of shards"
        )
    if workers:
        last = min(workers, key=lambda worker: worker.seen_seconds)
        seen = f"{last.name} ({last.state}, {last.seen_seconds:.0f} s ago)"
        return f"no worker is alive on {_name(keys)}; the last one was {seen}"
    return f"no worker is alive on {_name(keys)}, and none was of late; is this the right queue?"


def _name(keys: Keys) -> str:
    name = f"queue {keys.queue!r}"
    return name if keys.shard == FIRST_SHARD else f"shard {keys.shard} of {name}"


def _workers_in(registry: Mapping[bytes, bytes], *, now_ms: int) -> list[WorkerInfo]:
    return readable(partial(worker_of, now_ms=now_ms), registry.items())
