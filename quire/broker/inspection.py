"""Looks at queues from outside: how much waits, how long, who is there. Changes nothing.

Plain reads in two round trips for any number of queues, so that one reader can watch them all. The
numbers of one look belong to neighbouring moments, not to one: a request may be claimed between the
two round trips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import redis
from redis.exceptions import ResponseError

from quire.errors import BrokerUnavailable
from quire.keys import GROUP, Keys
from quire.transitions.replies import readable, worker_of
from quire.transitions.values import WorkerInfo
from quire.transport.connection import Retrying
from quire.wire.protocol import Priority

#: Deliveries looked at per stream for the one that waits longest for its claim. More than workers
#: hold between read and claim, unless many hundreds of them die at once.
MAX_PENDING_SEEN = 256

#: Streams of a shard: for each class one of new requests, and one of those that came back.
_NUM_STREAMS = 2 * len(Priority)


@dataclass(frozen=True, slots=True)
class IngressState:
    """The requests of one class in its ingress streams, of new ones and of those that came back.

    One that came back counts from then on. `undelivered_seconds`: since the oldest undelivered
    entry came into its stream; where no request is queued, all entries are of ended ones, and their
    age says nothing. `pending_seconds`: since the delivery of the one that waits longest for its
    claim. 0 where there is none.
    """

    priority: Priority
    num_undelivered: int
    num_pending: int
    undelivered_seconds: float
    pending_seconds: float


@dataclass(frozen=True, slots=True)
class ShardState:
    """One shard of a queue: its streams by priority, and what else belongs to it.

    `num_queued` requests wait for a worker now. The streams may have more entries: that of a
    request which was cancelled, or waited too long, stays there until a worker has read it.
    `num_due` are those of `num_scheduled` that should have been queued by now, and
    `num_expired_leases` those of `num_leases` that nobody has renewed or reaped in time. `workers`
    are those of the registry, silent ones included.
    """

    ingress: tuple[IngressState, ...]
    is_paused: bool
    num_queued: int
    num_scheduled: int
    num_due: int
    num_leases: int
    num_expired_leases: int
    num_dead_letters: int
    workers: tuple[WorkerInfo, ...]

    @property
    def num_lost(self) -> int:
        """Queued requests that have no entry in any stream: at least so many.

        An entry of a request that has ended may stand for one that is lost.
        """
        num_entries = sum(each.num_undelivered + each.num_pending for each in self.ingress)
        return max(0, self.num_queued - num_entries)


def models_of(workers: Iterable[WorkerInfo]) -> list[str]:
    """The names of the models that workers who are there say they serve, sorted."""
    return sorted(adapters_of(workers))


def adapters_of(workers: Iterable[WorkerInfo]) -> dict[str, list[str]]:
    """The same by name, and for each of them the adapters that some worker has, sorted."""
    found: dict[str, set[str]] = {}
    for worker in workers:
        if worker.model and worker.is_alive:
            found.setdefault(worker.model, set()).update(worker.adapters)
    return {model: sorted(found[model]) for model in sorted(found)}


def inspect_shards(connection: redis.Redis, shards: Sequence[Keys]) -> list[ShardState]:
    """The state of each shard, in the order given; one without any key is empty, not an error.

    Tries once, so that it takes no longer than the connection's timeouts allow: BrokerUnavailable.
    """
    return Retrying(0.0)(lambda: _inspect(connection, shards))


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """How full the server is, whatever else it keeps; a limit of 0 is none."""

    used_bytes: int
    limit_bytes: int


def inspect_memory(connection: redis.Redis) -> ServerMemory | None:
    """The memory of the server; None where it does not tell this user. Tries once, as above."""
    try:
        info: Any = Retrying(0.0)(lambda: connection.info("memory"))
    except BrokerUnavailable as error:
        if isinstance(error.__cause__, ResponseError):
            return None
        raise
    return ServerMemory(int(info["used_memory"]), int(info["maxmemory"]))


@dataclass(frozen=True, slots=True)
class _Group:
    """What the first round trip tells of a stream; `lag` is None where the server cannot tell."""

    last_delivered: bytes
    length: int
    pending: int
    lag: int | None


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the first round trip tells of a shard; `workers` as they stand in the registry."""

    groups: tuple[_Group, ...]
    is_paused: bool
    num_waiting: int
    num_scheduled: int
    num_leases: int
    num_dead_letters: int
    workers: Mapping[bytes, bytes]


def _inspect(connection: redis.Redis, shards: Sequence[Keys]) -> list[ShardState]:
    replies = _answers(connection, lambda pipeline: _ask_sizes(pipeline, shards))
    seconds, microseconds = next(replies)
    now_ms = int(seconds) * 1000 + int(microseconds) // 1000
    sizes = [_read_sizes(replies) for _ in shards]
    replies = _answers(connection, lambda pipeline: _ask_heads(pipeline, shards, sizes, now_ms))
    return [_read_heads(replies, known, now_ms=now_ms) for known in sizes]


def _ask_sizes(pipeline: Any, shards: Sequence[Keys]) -> None:
    pipeline.time()
    for keys in shards:
        for stream in keys.all_ingress:
            pipeline.xinfo_groups(stream)
            pipeline.xlen(stream)
        pipeline.hexists(keys.control, "paused")
        pipeline.zcard(keys.wait)
        pipeline.zcard(keys.delay)
        pipeline.zcard(keys.lease)
        pipeline.xlen(keys.dead)
        pipeline.hgetall(keys.workers)


def _read_sizes(replies: Iterator[Any]) -> _Sizes:
    groups = tuple(_group_of(next(replies), int(next(replies))) for _ in range(_NUM_STREAMS))
    return _Sizes(
        groups=groups,
        is_paused=bool(next(replies)),
        num_waiting=int(next(replies)),
        num_scheduled=int(next(replies)),
        num_leases=int(next(replies)),
        num_dead_letters=int(next(replies)),
        workers=next(replies),
    )


def _ask_heads(pipeline: Any, shards: Sequence[Keys], sizes: Sequence[_Sizes], now_ms: int) -> None:
    for keys, known in zip(shards, sizes, strict=True):
        for stream, group in zip(keys.all_ingress, known.groups, strict=True):
            pipeline.xrange(stream, min=b"(" + group.last_delivered, count=1)
            pipeline.xpending_range(stream, GROUP, min="-", max="+", count=MAX_PENDING_SEEN)
        pipeline.zcount(keys.delay, "-inf", now_ms)
        pipeline.zcount(keys.lease, "-inf", now_ms)


def _read_heads(replies: Iterator[Any], known: _Sizes, *, now_ms: int) -> ShardState:
    # The two were counted at neighbouring moments.
    num_queued = max(0, known.num_waiting - known.num_scheduled)
    streams = [
        _ingress_of(
            priority, group, next(replies), next(replies), now_ms=now_ms, is_ended=not num_queued
        )
        for priority, group in zip(2 * list(Priority), known.groups, strict=True)
    ]
    new, resumed = streams[: len(Priority)], streams[len(Priority) :]
    return ShardState(
        ingress=tuple(map(_together, new, resumed)),
        is_paused=known.is_paused,
        num_queued=num_queued,
        num_scheduled=known.num_scheduled,
        num_due=int(next(replies)),
        num_leases=known.num_leases,
        num_expired_leases=int(next(replies)),
        num_dead_letters=known.num_dead_letters,
        workers=tuple(readable(partial(worker_of, now_ms=now_ms), known.workers.items())),
    )


def _answers(connection: redis.Redis, ask: Callable[[Any], None]) -> Iterator[Any]:
    """The replies of one round trip. A stream or group that is missing is an empty reply.

    Redis makes a stream with its first request and its group with the first worker, so that neither
    says anything about the queue but that nobody was there yet.
    """
    with connection.pipeline(transaction=False) as pipeline:
        ask(pipeline)
        replies = pipeline.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception) and not _is_missing(reply):
            raise reply
    return iter([[] if isinstance(reply, Exception) else reply for reply in replies])


def _is_missing(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, ResponseError) and ("no such key" in text or "nogroup" in text)


def _group_of(rows: Sequence[Mapping[str, Any]], length: int) -> _Group:
    for row in rows:
        if row["name"] == GROUP.encode():
            lag = row.get("lag")
            return _Group(
                last_delivered=row["last-delivered-id"],
                length=length,
                pending=int(row["pending"]),
                lag=None if lag is None else int(lag),
            )
    return _Group(last_delivered=b"0-0", length=length, pending=0, lag=None)


def _ingress_of(
    priority: Priority, group: _Group, waiting: Any, pending: Any, *, now_ms: int, is_ended: bool
) -> IngressState:
    # Servers before 7.0 know no lag, others lose it when somebody deletes an entry. A claim removes
    # its entry, so what is in the stream and not pending is undelivered.
    lag = max(0, group.length - group.pending) if group.lag is None else group.lag
    has_age = waiting and not is_ended
    entered_ms = int(waiting[0][0].partition(b"-")[0]) if has_age else now_ms
    idle_ms = max((int(row["time_since_delivered"]) for row in pending), default=0)
    return IngressState(
        priority=priority,
        num_undelivered=lag,
        num_pending=group.pending,
        undelivered_seconds=max(0, now_ms - entered_ms) / 1000,
        pending_seconds=idle_ms / 1000,
    )


def _together(new: IngressState, resumed: IngressState) -> IngressState:
    """Both streams of one class as one."""
    return IngressState(
        priority=new.priority,
        num_undelivered=new.num_undelivered + resumed.num_undelivered,
        num_pending=new.num_pending + resumed.num_pending,
        undelivered_seconds=max(new.undelivered_seconds, resumed.undelivered_seconds),
        pending_seconds=max(new.pending_seconds, resumed.pending_seconds),
    )
