"""Checks at start whether Redis can keep the promise of the setting `durable`.

If it cannot, brokers refuse to commit the end of a request. With this check the worker exits with a
clear message, instead of running without ever ending a request.
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
    """Return when the server has passed the check; retry while it is unreachable.

    Setting `ending` ends the retries.

    Raises:
        DurabilityUnavailable: the server cannot be durable; the message says why.
    """
    durability = Durability(connection, keys, longest_seconds=longest_block_of(connection))
    for pause in pauses():
        try:
            Retrying(RETRY_SECONDS, connection)(durability.require)
        except BrokerUnavailable:
            if not ending.wait(pause):
                continue
        return
