"""Reads the state of queues: how many requests wait, for how long, and which workers there are.

Changes nothing. Two round trips for any number of queues, so that one reader can watch them all.
The numbers do not belong to exactly one moment: a request may be claimed between the two round
trips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import redis
from redis.exceptions import ResponseError

from quire.errors import BrokerUnavailable, ProtocolError
from quire.keys import GROUP, Keys
from quire.queue.clock import ms_of
from quire.queue.rank.policy import POLICY_FIELDS, QueuePolicy, policy_of
from quire.queue.workers.workers import WorkerInfo, workers_in
from quire.transport.cluster.parts import at_each_node, servers_of
from quire.transport.procedure import Command, Procedure, RoundTrip, command
from quire.transport.retrying import Retrying
from quire.wire.codec import reading
from quire.wire.protocol import Activity, Priority

_State = TypeVar("_State")


@dataclass(frozen=True, slots=True)
class IngressState:
    """The queued requests of one class, and the entries of its ingress stream.

    `num_queued`: the requests in the rank set. The stream has as many entries, and those of
    requests that were cancelled or waited too long, until a worker consumes them.
    `undelivered_seconds`: the age of the oldest undelivered entry, or of the request that is
    claimed next, whichever is more; 0 if no request is queued.
    """

    priority: Priority
    num_undelivered: int
    undelivered_seconds: float
    num_queued: int


@dataclass(frozen=True, slots=True)
class ShardState:
    """One shard of a queue: its streams by priority, and its other counts.

    `num_queued` requests wait for a worker now. The streams may have more entries: the entry of a
    request that was cancelled, or waited too long, stays until a worker consumes it. `num_due` of
    the `num_scheduled` should have been queued by now. `num_expired_leases` of the `num_leases`
    were neither renewed nor reaped in time. `workers` are those of the registry, silent ones
    included. `policy` ranks the queued requests.
    `num_turns` of the requests that have not ended are turns of sessions. `num_waiting_tokens` are
    the tokens of the queued and scheduled requests, as the limit of the backlog counts them.
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
    policy: QueuePolicy | None = None
    num_turns: int = 0
    num_waiting_tokens: int = 0

    @property
    def activities(self) -> dict[Activity, int]:
        """How many claimed requests do what, as live workers told at their last beat."""
        loads = [worker.load for worker in self.workers if worker.is_alive]
        return {one: int(sum(load.get(one, 0) for load in loads)) for one in Activity}

    @property
    def num_lost(self) -> int:
        """A lower bound for the queued requests that are in no rank set.

        An open turn of a session may hide one that is lost.
        """
        num_ranked = sum(each.num_queued for each in self.ingress)
        return max(0, self.num_queued - num_ranked - self.num_turns)


def inspect_shards(connection: redis.Redis, shards: Sequence[Keys]) -> list[ShardState]:
    """The state of each shard, in the given order; a shard without any key is empty.

    Does not retry, so that it takes no longer than the connection's timeouts. BrokerUnavailable.
    """
    return read_shards(states, connection, shards)


def read_shards(
    read: Callable[[Sequence[Keys]], Procedure[Sequence[_State]]],
    connection: redis.Redis,
    shards: Sequence[Keys],
) -> list[_State]:
    """What a procedure reads of each shard, in the given order; run for each node of a cluster.

    Does not retry. BrokerUnavailable, and the errors of the procedure.
    """
    return Retrying(0.0)(lambda: at_each_node(read, connection, shards))


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """The memory that the whole server uses, and its limit; 0 is no limit.

    Of a cluster, those of the fullest master: it is the first one to refuse requests.
    """

    used_bytes: int
    limit_bytes: int

    @property
    def share(self) -> float:
        """The used share of the limit; 0 without a limit."""
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 0.0


def inspect_memory(connection: redis.Redis) -> ServerMemory | None:
    """The memory of the server; None if this user may not read it. Does not retry."""
    try:
        infos: list[Any] = Retrying(0.0)(
            lambda: [server.info("memory") for server in servers_of(connection).values()]
        )
    except BrokerUnavailable as error:
        if isinstance(error.__cause__, ResponseError):
            return None
        raise
    memories = [ServerMemory(int(one["used_memory"]), int(one["maxmemory"])) for one in infos]
    return max(memories, key=lambda memory: (memory.share, memory.used_bytes))


@dataclass(frozen=True, slots=True)
class _Group:
    """The first round trip's data of a stream; `lag` are its undelivered entries."""

    last_delivered: bytes
    lag: int


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The first round trip's data of a shard; `shard` lacks what the second one asks for.

    `ranked`: the sizes of the rank sets. `heads`: the first member of each.
    """

    groups: tuple[_Group, ...]
    ranked: tuple[int, ...]
    heads: tuple[bytes | None, ...]
    shard: ShardState


def states(shards: Sequence[Keys]) -> Procedure[list[ShardState]]:
    """See `inspect_shards`."""
    replies = yield from _answers(_ask_sizes(shards))
    now_ms = ms_of(next(replies))
    sizes = [_read_sizes(replies, now_ms=now_ms) for _ in shards]
    replies = yield from _answers(_ask_heads(shards, sizes, now_ms))
    return [_read_heads(replies, known, now_ms=now_ms) for known in sizes]


def _ask_sizes(shards: Sequence[Keys]) -> Iterator[Command]:
    yield command("time")
    for keys in shards:
        for stream in keys.all_ingress:
            yield command("xinfo_groups", stream)
            yield command("xlen", stream)
        for ranks in keys.all_ranks:
            yield command("zcard", ranks)
            yield command("zrange", ranks, 0, 0)
        yield command("hexists", keys.control, "paused")
        yield command("hmget", keys.control, POLICY_FIELDS)
        yield command("zcard", keys.wait)
        yield command("zcard", keys.delay)
        yield command("zcard", keys.lease)
        yield command("xlen", keys.dead)
        yield command("zcard", keys.turns)
        yield command("hget", keys.counts, "tokens")
        yield command("hgetall", keys.workers)


def _read_sizes(replies: Iterator[Any], *, now_ms: int) -> _Sizes:
    groups = tuple(_group_of(next(replies), int(next(replies))) for _ in Priority)
    ranks = [(int(next(replies)), next(replies)) for _ in Priority]
    is_paused, policy = bool(next(replies)), _policy_in(next(replies))
    num_waiting, num_scheduled = int(next(replies)), int(next(replies))
    return _Sizes(
        groups=groups,
        ranked=tuple(number for number, _ in ranks),
        heads=tuple(row[0] if row else None for _, row in ranks),
        shard=ShardState(
            ingress=(),
            is_paused=is_paused,
            policy=policy,
            # The two were not counted at exactly the same moment.
            num_queued=max(0, num_waiting - num_scheduled),
            num_scheduled=num_scheduled,
            num_due=0,
            num_leases=int(next(replies)),
            num_expired_leases=0,
            num_dead_letters=int(next(replies)),
            num_turns=int(next(replies)),
            num_waiting_tokens=_count_of(next(replies)),
            workers=tuple(workers_in(next(replies), now_ms=now_ms)),
        ),
    )


def _ask_heads(shards: Sequence[Keys], sizes: Sequence[_Sizes], now_ms: int) -> Iterator[Command]:
    for keys, known in zip(shards, sizes, strict=True):
        for stream, group in zip(keys.all_ingress, known.groups, strict=True):
            yield command("xrange", stream, min=b"(" + group.last_delivered, count=1)
        for head in known.heads:
            name = (head or b"").decode(errors="replace")
            yield command("hget", keys.request(name), "arrival")
        yield command("zcount", keys.delay, "-inf", now_ms)
        yield command("zcount", keys.lease, "-inf", now_ms)


def _read_heads(replies: Iterator[Any], known: _Sizes, *, now_ms: int) -> ShardState:
    oldest, has_queued = [next(replies) for _ in Priority], known.shard.num_queued > 0
    streams = [_seconds_since(entries if has_queued else [], now_ms=now_ms) for entries in oldest]
    heads = [_age_of(next(replies), now_ms=now_ms) for _ in Priority]
    return replace(
        known.shard,
        ingress=tuple(
            IngressState(priority, group.lag, max(stream, head), num_ranked)
            for priority, group, stream, head, num_ranked in zip(
                Priority, known.groups, streams, heads, known.ranked, strict=True
            )
        ),
        num_due=int(next(replies)),
        num_expired_leases=int(next(replies)),
    )


def _answers(commands: Iterable[Command]) -> Procedure[Iterator[Any]]:
    """The replies of one round trip. A missing stream or group is an empty reply.

    The first request creates a stream, and the first worker its group. So a missing one only means
    that there was no request or no worker yet.
    """
    replies = yield RoundTrip(tuple(commands), keeps_errors=True)
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
            # Redis before 7.0 has no lag, and later versions lose it when an entry is deleted. A
            # claim removes its entry, so all entries in the stream are undelivered.
            lag = row.get("lag")
            return _Group(row["last-delivered-id"], length if lag is None else int(lag))
    return _Group(b"0-0", length)


def _seconds_since(entries: Any, *, now_ms: int) -> float:
    """The age of the first entry; 0 without one."""
    entered_ms = int(entries[0][0].partition(b"-")[0]) if entries else now_ms
    return max(0, now_ms - entered_ms) / 1000


def _count_of(value: Any) -> int:
    """A number of the counts hash; 0 if it is absent. ProtocolError for what is no number."""
    with reading("a count of the queue"):
        return int(value or 0)


def _policy_in(values: Sequence[bytes | None]) -> QueuePolicy | None:
    """The policy of a shard; None for none, and for one that nobody can read."""
    try:
        return policy_of(dict(zip(map(str.encode, POLICY_FIELDS), values, strict=True)))
    except ProtocolError:
        return None


def _age_of(arrival: Any, *, now_ms: int) -> float:
    """How long ago a request arrived, in seconds; 0 for one that has gone since."""
    if not isinstance(arrival, bytes) or not arrival.isdigit():
        return 0.0
    return max(0.0, now_ms / 1000 - int(arrival) / 1_000_000)
