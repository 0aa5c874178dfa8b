"""Reads about several shards: one part for each node of a cluster, so that each part is a pipeline.

Of one server, all shards are one part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import redis

from quire.keys import Keys
from quire.transport.cluster.connection import SlotConnection
from quire.transport.cluster.redirects import slot_of
from quire.transport.procedure import Procedure, run, send

_State = TypeVar("_State")
_Item = TypeVar("_Item")


def at_each_node(
    read: Callable[[Sequence[Keys]], Procedure[Sequence[_State]]],
    connection: redis.Redis,
    shards: Sequence[Keys],
) -> list[_State]:
    """What the procedure reads of the shards of each node, in the order of `shards`.

    RedisError, also if only one node does not answer, and the errors of the procedure.
    """
    found: dict[int, _State] = {}
    for node, part in by_node(connection, shards, [keys.prefix for keys in shards]):
        states = run(read([keys for _, keys in part]), partial(send, node))
        found |= {index: state for (index, _), state in zip(part, states, strict=True)}
    return [found[index] for index in range(len(shards))]


def servers_of(connection: redis.Redis) -> dict[str, redis.Redis]:
    """A connection to each server that takes writes, by `host:port`; of one server, just this one.

    RedisError if no node of a cluster can be reached.
    """
    if isinstance(connection, SlotConnection):
        return connection.nodes.masters()
    return {"": connection}


def by_node(
    connection: redis.Redis, items: Iterable[_Item], keys: Sequence[str]
) -> list[tuple[redis.Redis, list[tuple[int, _Item]]]]:
    """Parts items by the node that owns the key of each; with each item its index. RedisError.

    Of one server, all items are one part. So a pipeline for each part reaches every item.
    """
    indexed = list(enumerate(items))
    if not isinstance(connection, SlotConnection):
        return [(connection, indexed)]
    parts: dict[str, tuple[redis.Redis, list[tuple[int, _Item]]]] = {}
    for (index, item), key in zip(indexed, keys, strict=True):
        client = connection.at_slot_of(key)
        _, part = parts.setdefault(connection.nodes.name_of(slot_of(key)), (client, []))
        part.append((index, item))
    return list(parts.values())
