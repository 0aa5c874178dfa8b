"""Checks at the start whether this Redis can keep the promise of the setting `durable`.

Where it cannot, brokers refuse to commit an end. Checking first lets the worker exit with one clear
sentence, instead of running and never ending a request.
"""

import threading

import redis

from quire.errors import BrokerUnavailable
from quire.keys import Keys
from quire.transport.connection import Retrying, longest_block_of
from quire.transport.durability import Durability
from service.outgoing.contact import pauses

#: How long one check is retried before the next pause.
RETRY_SECONDS = 0.5


def require_durability(connection: redis.Redis, keys: Keys, *, ending: threading.Event) -> None:
    """Return once the server has passed the check; wait while it is away, until `ending` is set.

    Raises:
        DurabilityUnavailable: it cannot be durable; the message says why.
    """
    durability = Durability(connection, keys, longest_seconds=longest_block_of(connection))
    for pause in pauses():
        try:
            Retrying(RETRY_SECONDS, connection)(durability.require)
        except BrokerUnavailable:
            if not ending.wait(pause):
                continue
        return
