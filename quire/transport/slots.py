"""The node that a key belongs to, for every kind of connection.

Only a connection to a cluster has nodes, so nobody else loads what is in cluster/.
"""

from __future__ import annotations

from typing import Any, TypeVar

_Connection = TypeVar("_Connection")


def for_key(connection: _Connection, key: str) -> _Connection:
    """The client whose commands go to the owner of this key; of one server, the connection itself.

    `key` may be the prefix of a shard: its hash tag decides. The connection of a cluster may be the
    client of another slot.
    """
    at_slot_of: Any = getattr(connection, "at_slot_of", None)
    found: _Connection = at_slot_of(key) if at_slot_of else connection
    return found


def owner_of(connection: object) -> str:
    """`host:port` of the node to which the commands of a client from `for_key` go now.

    Asks nobody: `unknown` before the first command. Empty for a client of one server.
    """
    return str(getattr(connection, "owner", ""))
