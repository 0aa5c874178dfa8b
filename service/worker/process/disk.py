"""Checks at start whether Redis can keep the promise of the setting `durable`.

If it cannot, brokers refuse to commit the end of a request. With this check the worker exits with a
clear message, instead of running without ever ending a request.
"""

import threading
from collections.abc import Sequence

import redis

from quire.errors import BrokerUnavailable, QueueFull
from quire.keys import Keys
from quire.transport.cluster.parts import by_node
from quire.transport.connection import longest_block_of
from quire.transport.durability import Durability
from quire.transport.retrying import Retrying
from service.worker.outgoing.contact import pauses

#: How long one check is retried before the next pause.
RETRY_SECONDS = 0.5


def require_durability(
    connection: redis.Redis, shards: Sequence[Keys], *, ending: threading.Event
) -> None:
    """Return when the server of each shard has passed the check; retries through outages.

    Setting `ending` ends the retries.

    Raises:
        DurabilityUnavailable: the server cannot be durable; the message says why.
    """
    for pause in pauses():
        try:
            Retrying(RETRY_SECONDS, connection)(lambda: _require(connection, shards))
        except (BrokerUnavailable, QueueFull):
            if not ending.wait(pause):
                continue
        return


def _require(connection: redis.Redis, shards: Sequence[Keys]) -> None:
    """One check for each server: those of a cluster may have different settings."""
    for server, part in by_node(connection, shards, [keys.prefix for keys in shards]):
        _, keys = part[0]
        Durability(server, keys, longest_seconds=longest_block_of(connection)).require()
