"""Reads the ends of one shard, and keeps their webhooks in Redis."""

import asyncio
import time
from collections.abc import Mapping, Sequence

import structlog
from redis.exceptions import RedisError

from quire.errors import ProtocolError, QuireError
from quire.queue.broker_async import AsyncBroker
from quire.queue.ends.telling import Delivery
from quire.queue.groups.grouping import GroupProgress
from quire.transport.connection import is_refused
from service.notifier.deliveries import Deliveries
from service.notifier.endpoints import Endpoint
from service.notifier.events import (
    GROUP_ENDED,
    Event,
    event_of,
    event_of_batch,
    event_of_group,
)
from service.notifier.metrics import NotifierMetrics

#: The consumer group of all notifiers.
GROUP = "notifier"

#: How long a read of the ends waits.
READ_SECONDS = 1.0

#: After so long another notifier takes over what one has read and not kept.
TAKE_OVER_SECONDS = 30.0

#: The pause after an error of Redis.
AGAIN_SECONDS = 1.0

_log = structlog.get_logger("service.notifier")


class EndIntake:
    """Reads the ends of one shard, and keeps their webhooks.

    An end is acknowledged after its webhook is kept: so any notifier may die at any moment.
    """

    def __init__(
        self,
        brokers: Sequence[AsyncBroker],
        broker: AsyncBroker,
        deliveries: Deliveries,
        endpoints: Mapping[str, Endpoint],
        consumer: str,
        *,
        metrics: NotifierMetrics,
        take_over_seconds: float = TAKE_OVER_SECONDS,
        replay: bool = False,
    ) -> None:
        self._brokers = brokers
        self._broker = broker
        self._deliveries = deliveries
        self._endpoints = endpoints
        self._consumer = consumer
        self._metrics = metrics
        self._take_over_seconds = take_over_seconds
        #: A group that never was begins with the oldest end that is kept.
        self._replay = replay
        #: From here on no end is missed.
        self.has_begun = asyncio.Event()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        broker, names = self._broker, (GROUP, self._consumer)
        looked, has_left_some = -self._take_over_seconds, True
        while True:
            try:
                if not self.has_begun.is_set():
                    if await broker.begin(GROUP, from_oldest=self._replay):
                        first = "oldest" if self._replay else "next"
                        _log.info(f"begins with the {first} end", shard=broker.keys.shard)
                    self.has_begun.set()
                if has_left_some:
                    # Before new ones: Redis would have to remember more and more of them.
                    left = await broker.delivered(*names)
                    await self.keep(left)
                    has_left_some = bool(left.positions)
                    continue
                if time.monotonic() - looked >= self._take_over_seconds / 3:
                    idle_seconds = self._take_over_seconds
                    await self.keep(await broker.take_over(*names, idle_seconds=idle_seconds))
                    looked = time.monotonic()
                await self.keep(await broker.deliver(*names, block_seconds=READ_SECONDS))
                self._metrics.note_contact()
            except (QuireError, RedisError) as error:
                has_left_some = True
                _log.warning("the ends cannot be read", error=str(error))
                await asyncio.sleep(AGAIN_SECONDS)

    async def keep(self, delivery: Delivery) -> None:
        """Keeps the webhooks of these ends, and acknowledges the ends after that."""
        queue = self._broker.keys.queue
        for end in delivery.ends:
            await self._add(event_of(end, queue=queue))
        for batch in delivery.batches:
            await self._add(event_of_batch(batch, queue=queue))
        for group, tenant in {end.group: end.tenant for end in delivery.ends if end.group}.items():
            try:
                await self._end_group(group, tenant)
            except QuireError as error:
                if not (isinstance(error, ProtocolError) or is_refused(error)):
                    raise
                # A group that cannot be read must not hold up the others.
                self._drop("the group cannot be read", group=group, error=str(error))
        await self._broker.acknowledge(GROUP, delivery.positions)

    async def _end_group(self, group: str, tenant: str) -> None:
        """Keeps the webhook of a group without an open member in any shard.

        It is the same whichever end of the group led here. `tenant` is that of this end, for a last
        end that an earlier version has written.
        """
        if not any(GROUP_ENDED in endpoint.events for endpoint in self._endpoints.values()):
            return
        parts = await self._parts_of(group)
        # The parts are read one after the other. Only if none has changed they were once all so. If
        # one has, another end comes, which leads here again.
        if any(not state.is_terminal for part in parts for state in part.counts) or (
            parts != await self._parts_of(group)
        ):
            return
        if any(part.last_end for part in parts):
            queue = self._broker.keys.queue
            await self._add(event_of_group(group, parts, queue=queue, tenant=tenant))
        else:
            self._drop("the group has expired", group=group)

    async def _parts_of(self, group: str) -> list[GroupProgress]:
        return [await broker.group_progress(group) for broker in self._brokers]

    async def _add(self, event: Event) -> None:
        if not self._wants(event.tenant, event.type):
            self._metrics.count_end("unwanted")
        elif await self._deliveries.add(event):
            self._metrics.count_end("kept")
        else:
            self._drop("too many wait", tenant=event.tenant, type=event.type)

    def _drop(self, reason: str, **what: str) -> None:
        self._metrics.count_end("dropped")
        _log.error(f"a webhook is dropped: {reason}", **what)

    def _wants(self, tenant: str, kind: str) -> bool:
        endpoint = self._endpoints.get(tenant)
        return endpoint is not None and kind in endpoint.events
