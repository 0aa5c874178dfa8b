"""Reads about several shards: one part for each node of a cluster, so that each part is a pipeline.

Of one server, all shards are one part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import redis

from quire.keys import Keys
from quire.transport.cluster.connection import SlotConnection, by_node
from quire.transport.procedure import Procedure, run, send

_State = TypeVar("_State")


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
