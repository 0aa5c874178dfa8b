"""Takes the ends of a queue as a consumer of the group `notifier`, and posts their webhooks.

An end is acknowledged once its webhook is kept in Redis, and the webhook is removed once its
endpoint has taken it. So any notifier may die at any moment, and each webhook is posted at least
once. Any number of notifiers share the work.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import redis.asyncio
import structlog
from redis.exceptions import RedisError

from quire.broker.async_broker import AsyncBroker, connect_async
from quire.broker.telling import Delivery
from quire.errors import QuireError
from quire.records import State
from quire.wire.ends import End
from service.notifier.circuits import Circuits
from service.notifier.deliveries import Deliveries, Pending
from service.notifier.endpoints import Endpoint
from service.notifier.events import GROUP_ENDED, Event, event_of, event_of_group
from service.notifier.posting import Poster
from service.notifier.settings import NotifierSettings

#: The consumer group of all notifiers.
GROUP = "notifier"

#: How long a read of the ends waits, and how often a notifier looks for webhooks that are due.
READ_SECONDS, LOOK_SECONDS = 1.0, 0.25

#: After so long another notifier takes over what one has read and not kept.
TAKE_OVER_SECONDS = 30.0

#: The most webhooks that are posted to one endpoint at once, per shard.
MAX_POSTS_PER_ENDPOINT = 4

#: The pause after an error of Redis.
AGAIN_SECONDS = 1.0

#: A notifier has a webhook for so many times the longest time of an attempt, and a second more.
LEASE_TIMEOUTS = 2

#: Each pause is so many times the one before it.
GROWTH = 4.0

_log = structlog.get_logger("service.notifier")


class Notifier:
    """One notifier of all shards of a queue. `run` returns after SIGTERM or SIGINT."""

    def __init__(self, settings: NotifierSettings, endpoints: Mapping[str, Endpoint]) -> None:
        self._settings = settings
        self._endpoints = endpoints
        self._circuits = Circuits(time.monotonic)
        self._consumer = f"{socket.gethostname()[:40]}-{os.getpid()}"
        self._brokers: list[AsyncBroker] = []

    async def run(self) -> None:
        """Takes ends and posts webhooks until a signal."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        settings = self._settings
        poster = Poster(
            allowed=settings.allowed,
            timeout_seconds=settings.post_timeout_seconds,
            max_connections=settings.max_posts,
        )
        connection = connect_async(settings.connection_url, block_seconds=READ_SECONDS)
        async with connection, poster, asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one)
                for shard in range(settings.shards)
                for one in self._of_shard(connection, poster, shard)
            ]
            _log.info("notifier ready", queue=settings.queue, tenants=len(self._endpoints))
            await stop.wait()
            # Attempts that have begun are finished; each has its timeout.
            for task in tasks:
                task.cancel()
        _log.info("notifier stopped")

    def _of_shard(
        self, connection: redis.asyncio.Redis, poster: Poster, shard: int
    ) -> tuple[Coroutine[Any, Any, None], ...]:
        settings = self._settings
        broker = AsyncBroker(connection, queue=settings.queue, shard=shard)
        self._brokers.append(broker)
        deliveries = Deliveries(
            connection,
            broker.keys,
            most_per_tenant=settings.max_pending,
            life_ms=int(settings.give_up_seconds * 1000),
        )
        intake = Intake(self._brokers, broker, deliveries, self._endpoints, self._consumer)
        sending = Sending(settings, deliveries, self._endpoints, self._circuits, poster)
        return intake.run(), sending.run()


class Intake:
    """Reads the ends of one shard, and keeps their webhooks."""

    def __init__(
        self,
        brokers: list[AsyncBroker],
        broker: AsyncBroker,
        deliveries: Deliveries,
        endpoints: Mapping[str, Endpoint],
        consumer: str,
    ) -> None:
        self._brokers = brokers
        self._broker = broker
        self._deliveries = deliveries
        self._endpoints = endpoints
        self._consumer = consumer

    async def run(self) -> None:
        """Runs until it is cancelled."""
        looked = -TAKE_OVER_SECONDS
        while True:
            try:
                if time.monotonic() - looked >= TAKE_OVER_SECONDS / 3:
                    await self.keep(
                        await self._broker.take_over(
                            GROUP, self._consumer, idle_seconds=TAKE_OVER_SECONDS
                        )
                    )
                    looked = time.monotonic()
                await self.keep(
                    await self._broker.deliver(GROUP, self._consumer, block_seconds=READ_SECONDS)
                )
            except (QuireError, RedisError) as error:
                _log.warning("the ends cannot be read", error=str(error))
                await asyncio.sleep(AGAIN_SECONDS)

    async def keep(self, delivery: Delivery) -> None:
        """Keeps the webhooks of these ends, and acknowledges the ends after that."""
        for end in delivery.ends:
            await self._add(event_of(end, queue=self._broker.keys.queue))
        # One end of each group, the last one, so that the end of the group is found after all.
        for end in {end.group: end for end in delivery.ends if end.group}.values():
            await self._end_group(end)
        await self._broker.acknowledge(GROUP, delivery.positions)

    async def _end_group(self, end: End) -> None:
        """Keeps the webhook of a group without an open member in any shard."""
        assert end.group is not None
        if not self._wants(end.tenant, GROUP_ENDED):
            return
        counts = Counter[State]()
        for broker in self._brokers:
            counts.update(await broker.group_counts(end.group))
        if all(state.is_terminal for state in counts):
            await self._add(event_of_group(end, counts, queue=self._broker.keys.queue))

    async def _add(self, event: Event) -> None:
        if self._wants(event.tenant, event.type) and not await self._deliveries.add(event):
            _log.error("a webhook is dropped: too many wait", tenant=event.tenant, type=event.type)

    def _wants(self, tenant: str, kind: str) -> bool:
        endpoint = self._endpoints.get(tenant)
        return endpoint is not None and kind in endpoint.events


class Sending:
    """Posts the webhooks of one shard that are due."""

    def __init__(
        self,
        settings: NotifierSettings,
        deliveries: Deliveries,
        endpoints: Mapping[str, Endpoint],
        circuits: Circuits,
        poster: Poster,
    ) -> None:
        self._settings = settings
        self._deliveries = deliveries
        self._endpoints = endpoints
        self._circuits = circuits
        self._poster = poster
        self._busy = Counter[str]()

    async def run(self) -> None:
        """Runs until it is cancelled, and finishes the attempts that have begun."""
        most = self._settings.max_posts
        lease_seconds = LEASE_TIMEOUTS * self._settings.post_timeout_seconds + 1.0
        running = set[asyncio.Task[None]]()
        try:
            while True:
                found: Sequence[Pending] = ()
                try:
                    found = await self._deliveries.take(
                        count=most - len(running), lease_seconds=lease_seconds
                    )
                except RedisError as error:
                    _log.warning("webhooks cannot be read", error=str(error))
                    await asyncio.sleep(AGAIN_SECONDS)
                running |= {asyncio.create_task(self._deliver(pending)) for pending in found}
                if not found:
                    await asyncio.sleep(LOOK_SECONDS)
                elif len(running) == most:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                running = {task for task in running if not task.done()}
        finally:
            # What was posted is noted, so that it is not posted again.
            if running:
                await asyncio.wait(running)

    async def _deliver(self, pending: Pending) -> None:
        if self._busy[pending.tenant] >= MAX_POSTS_PER_ENDPOINT:
            # A slow endpoint must not have all connections.
            with contextlib.suppress(RedisError):
                await self._deliveries.defer(pending, seconds=LOOK_SECONDS, was_tried=False)
            return
        self._busy[pending.tenant] += 1
        try:
            await self._post(pending)
        except RedisError as error:
            # It is due again after its lease.
            _log.warning("the fate of a webhook is not kept", error=str(error))
        finally:
            self._busy[pending.tenant] -= 1

    async def _post(self, pending: Pending) -> None:
        settings, tenant = self._settings, pending.tenant
        endpoint = self._endpoints.get(tenant)
        about = {"tenant": tenant, "webhook_id": pending.webhook_id, "attempts": pending.attempts}
        if endpoint is None or pending.age_seconds > settings.give_up_seconds:
            _log.error("a webhook is given up", **about, has_endpoint=endpoint is not None)
            await self._deliveries.forget(tenant, pending.webhook_id)
            return
        if pause := self._circuits.pause_of(tenant):
            await self._deliveries.defer(pending, seconds=pause, was_tried=False)
            return
        reason = await self._poster.post(endpoint, pending.webhook_id, pending.body)
        if reason is None:
            self._circuits.succeeded(tenant)
            await self._deliveries.forget(tenant, pending.webhook_id)
            return
        if self._circuits.failed(tenant):
            _log.warning("an endpoint fails again and again", tenant=tenant, reason=reason)
        pause = pause_after(pending.attempts, settings=settings)
        _log.info("a webhook is not taken", **about, reason=reason, again_seconds=round(pause, 1))
        await self._deliveries.defer(pending, seconds=pause, was_tried=True)


def pause_after(attempts: int, *, settings: NotifierSettings) -> float:
    """Seconds until the next attempt, after so many earlier ones and one more.

    Grows up to a limit. Half of it is random, so that what failed together comes back apart.
    """
    # With a bound on the exponent, no number is too large for a float.
    pause = settings.first_pause_seconds * GROWTH ** min(attempts, 30)
    return min(pause, settings.longest_pause_seconds) * random.uniform(0.5, 1.0)  # noqa: S311
