"""One queue: the brokers of its shards over one connection, and the view of all of them."""

from collections.abc import Sequence
from typing import Any

import redis

from quire.keys import Keys
from quire.queue.roles import Observer, Operator
from quire.queue.submit.routing import shard_of
from quire.queue.view.view import Part, QueueView, view_queues

#: How long a call of a page is retried. Short, because a person waits.
RETRY_SECONDS = 0.5


class QueueReading:
    """One queue; `brokers` read its shards, in order, and `operators` change them.

    All share `connection`, whose user may be an observer if nobody acts.
    """

    def __init__(
        self,
        connection: redis.Redis,
        name: str,
        *,
        shards: int = 1,
        max_queue_seconds: float = 86_400.0,
        retention_seconds: float = 3600.0,
    ) -> None:
        self.name = name
        self.connection = connection
        settings: dict[str, Any] = {
            "max_queue_seconds": max_queue_seconds,
            "retention_seconds": retention_seconds,
            "retry_seconds": RETRY_SECONDS,
        }
        self.brokers = [
            Observer(connection, queue=name, shard=shard, **settings) for shard in range(shards)
        ]
        self.operators = [
            Operator(connection, queue=name, shard=shard, **settings) for shard in range(shards)
        ]

    @property
    def keys(self) -> Sequence[Keys]:
        """The keys of the shards, in order."""
        return [broker.keys for broker in self.brokers]

    def broker_of(self, request_id: str) -> Observer:
        """The broker of the shard that a request is in."""
        return self.brokers[shard_of(request_id, len(self.brokers))]

    def operator_of(self, request_id: str) -> Operator:
        """The same, to change the request."""
        return self.operators[shard_of(request_id, len(self.operators))]

    def view(self, *parts: Part) -> QueueView:
        """These parts of the queue. BrokerUnavailable, ProtocolError."""
        return views_of([self], *parts)[0]


def views_of(queues: Sequence[QueueReading], *parts: Part) -> list[QueueView]:
    """The views of queues that share a connection. BrokerUnavailable, ProtocolError."""
    return view_queues(queues[0].connection, {queue.name: queue.keys for queue in queues}, *parts)
