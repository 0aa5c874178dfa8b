"""One queue: the brokers of its shards over one connection, and the view of all of them."""

from collections.abc import Sequence

import redis

from quire.keys import Keys
from quire.queue.broker import Broker
from quire.queue.submit.routing import shard_of
from quire.queue.view.view import Part, QueueView, view_queues

#: How long a call of a page is retried. Short, because a person waits.
RETRY_SECONDS = 0.5


class QueueReading:
    """One queue. `brokers` are those of its shards, in order; all share `connection`."""

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
        self.brokers = [
            Broker(
                connection,
                queue=name,
                shard=shard,
                max_queue_seconds=max_queue_seconds,
                retention_seconds=retention_seconds,
                retry_seconds=RETRY_SECONDS,
            )
            for shard in range(shards)
        ]

    @property
    def keys(self) -> Sequence[Keys]:
        """The keys of the shards, in order."""
        return [broker.keys for broker in self.brokers]

    def broker_of(self, request_id: str) -> Broker:
        """The broker of the shard that a request is in."""
        return self.brokers[shard_of(request_id, len(self.brokers))]

    def view(self, *parts: Part) -> QueueView:
        """These parts of the queue. BrokerUnavailable, ProtocolError."""
        return views_of([self], *parts)[0]


def views_of(queues: Sequence[QueueReading], *parts: Part) -> list[QueueView]:
    """The views of queues that share a connection. BrokerUnavailable, ProtocolError."""
    return view_queues(queues[0].connection, {queue.name: queue.keys for queue in queues}, *parts)
