"""Reads about several shards: one part for each node of a cluster, so that each part is a pipeline.

Of one server, all shards are one part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import redis

from quire.keys import Keys
from quire.transport.cluster.connection import SlotConnection, by_node

_State = TypeVar("_State")


def at_each_node(
    inspect: Callable[[redis.Redis, Sequence[Keys]], Sequence[_State]],
    connection: redis.Redis,
    shards: Sequence[Keys],
) -> list[_State]:
    """What `inspect` returns for the shards of each node, in the order of `shards`.

    RedisError, also if only one node does not answer.
    """
    found: dict[int, _State] = {}
    for node, part in by_node(connection, shards, [keys.prefix for keys in shards]):
        states = inspect(node, [keys for _, keys in part])
        found |= {index: state for (index, _), state in zip(part, states, strict=True)}
    return [found[index] for index in range(len(shards))]


def servers_of(connection: redis.Redis) -> dict[str, redis.Redis]:
    """A connection to each server that takes writes, by `host:port`; of one server, just this one.

    RedisError if no node of a cluster can be reached.
    """
    if isinstance(connection, SlotConnection):
        return connection.nodes.masters()
    return {"": connection}
