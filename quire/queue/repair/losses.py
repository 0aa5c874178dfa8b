"""Finds open requests that are in no stream or set of the queue any more. Changes nothing.

RESTORE (see `Broker.restore`) repairs such losses; this module only finds them, with plain reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from quire.keys import Keys
from quire.queue.repair.restore import Lost
from quire.transport.retrying import Retrying
from quire.transport.slots import for_key

#: The most open requests that are examined: about a second.
MAX_SEEN = 10_000

#: About how many of them are examined in one round trip.
_PER_LOOK = 500

#: The compared fields of a record. If none has changed, no transition came between two reads.
_FIELDS = ("state", "epoch", "priority", "arrival", "tenant", "session")


@dataclass(frozen=True, slots=True)
class Losses:
    """`lost`: request id -> what is missing. `num_seen` of `num_open` requests were examined."""

    num_open: int
    num_seen: int
    lost: Mapping[str, Lost] = field(default_factory=dict)


def inspect_losses(connection: redis.Redis, keys: Keys, *, most: int = MAX_SEEN) -> Losses:
    """Compares open requests of a shard with its streams and sets. BrokerUnavailable; no retry.

    A request may be claimed between two reads, so each that seems lost is read a second time.
    """
    connection = for_key(connection, keys.prefix)

    def look() -> Losses:
        found: dict[str, Lost] = {}
        cursor, num_seen = 0, 0
        while num_seen < most:
            reply: Any = connection.hscan(keys.open, cursor, count=_PER_LOOK)
            cursor, fields = reply
            names = [name.decode(errors="replace") for name in fields]
            found |= _lost_of(connection, keys, names)
            num_seen += len(names)
            if cursor == 0:
                break
        num_open: Any = connection.hlen(keys.open)
        return Losses(max(int(num_open), num_seen) if cursor else num_seen, num_seen, found)

    return Retrying(0.0)(look)


def _lost_of(connection: redis.Redis, keys: Keys, names: Sequence[str]) -> dict[str, Lost]:
    before = _records(connection, keys, names)
    asked: list[tuple[str, Lost, Callable[[Any], object]]] = []
    for name, record in zip(names, before, strict=True):
        if question := _question(keys, name, record):
            asked.append((name, *question))
    answers = _answers(connection, [ask for _, _, ask in asked])
    seem_lost = {
        name: lost
        for (name, lost, _), answer in zip(asked, answers, strict=True)
        if not _is_there(lost, answer)
    }
    parked = _parked(connection, keys, dict(zip(names, before, strict=True)), list(seem_lost))
    seem_lost = {name: lost for name, lost in seem_lost.items() if name not in parked}
    # The second read: a request with an unchanged record was not claimed, ended or moved meanwhile.
    was = dict(zip(names, before, strict=True))
    still = zip(seem_lost, _records(connection, keys, list(seem_lost)), strict=True)
    return {name: seem_lost[name] for name, record in still if record == was[name]}


def _parked(
    connection: redis.Redis,
    keys: Keys,
    records: Mapping[str, Sequence[bytes | None]],
    names: Sequence[str],
) -> set[str]:
    """The requests of `names` that wait for an earlier turn, and so are in no rank set."""
    sessions: dict[str, str] = {}
    for name in names:
        state, *_, tenant, session = records[name]
        if state == b"queued" and session is not None:
            sessions[name] = f"{(tenant or b'').decode()}:{session.decode()}"

    def ask(session: str) -> Callable[[Any], object]:
        least, most = f"[{session} ", f"({session}!"
        return lambda pipeline: pipeline.zrangebylex(keys.turns, least, most, start=0, num=1)

    firsts = _answers(connection, [ask(session) for session in sessions.values()])
    return {
        name
        for name, found in zip(sessions, firsts, strict=True)
        if found and found[0].decode().rpartition(" ")[2] != name
    }


def _question(
    keys: Keys, name: str, record: Sequence[bytes | None]
) -> tuple[Lost, Callable[[Any], object]] | None:
    """Where the record says that the request is, and the read that checks it."""
    state, _, priority, *_ = record
    if state is None:
        return Lost.RECORD, lambda pipeline: pipeline.hexists(keys.open, name)
    if state == b"scheduled":
        return Lost.DELAY, lambda pipeline: pipeline.zscore(keys.delay, name)
    if state == b"running":
        return Lost.LEASE, lambda pipeline: pipeline.zscore(keys.lease, name)
    if state != b"queued":
        return None
    return Lost.ENTRY, lambda pipeline: pipeline.zscore(keys.rank(int(priority or 0)), name)


def _is_there(lost: Lost, answer: Any) -> bool:
    if lost is Lost.RECORD:
        # If it is not open any more, it has ended between two reads.
        return not answer
    return answer is not None


def _records(
    connection: redis.Redis, keys: Keys, names: Sequence[str]
) -> list[Sequence[bytes | None]]:
    def ask(name: str) -> Callable[[Any], object]:
        return lambda pipeline: pipeline.hmget(keys.request(name), *_FIELDS)

    return _answers(connection, [ask(name) for name in names])


def _answers(connection: redis.Redis, asks: Sequence[Callable[[Any], object]]) -> list[Any]:
    if not asks:
        return []
    with connection.pipeline(transaction=False) as pipeline:
        for ask in asks:
            ask(pipeline)
        return pipeline.execute()
