"""Takes the ends of a queue as a consumer of the group `notifier`, and posts their webhooks.

An end is acknowledged once its webhook is kept in Redis, and the webhook is removed once its
endpoint has taken it. So any notifier may die at any moment, and each webhook is posted at least
once. Any number of notifiers share the work.
"""

import asyncio
import os
import socket
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import redis.asyncio
import structlog

from quire.queue.broker_async import AsyncBroker
from quire.transport.connection_async import connect_async
from service.notifier.circuits import Circuits
from service.notifier.deliveries import Deliveries
from service.notifier.endpoints import Endpoint
from service.notifier.intake import READ_SECONDS, EndIntake
from service.notifier.metrics import NotifierMetrics
from service.notifier.posting import Poster
from service.notifier.sending import Sending
from service.notifier.settings import NotifierSettings
from service.shared.probes import ProbeServer
from service.shared.process import on_signals

#: How often the event loop gives a sign of life, and after how long without one it hangs.
SIGN_SECONDS, HANGING_SECONDS = 1.0, 60.0

_log = structlog.get_logger("service.notifier")


class Notifier:
    """One notifier of all shards of a queue. `run` returns after SIGTERM or SIGINT.

    Raises:
        ConfigurationError: it cannot listen on the address.
    """

    def __init__(self, settings: NotifierSettings, endpoints: Mapping[str, Endpoint]) -> None:
        self._settings = settings
        self._endpoints = endpoints
        self._consumer = f"{socket.gethostname()[:40]}-{os.getpid()}"
        self._brokers: list[AsyncBroker] = []
        self._circuits: list[Circuits] = []
        self._intakes: list[EndIntake] = []
        self._alive_at = time.monotonic()
        self._is_stopping = False
        self.metrics = NotifierMetrics(
            num_open_circuits=lambda: sum(one.num_open for one in self._circuits)
        )
        self._server = ProbeServer(
            self.metrics.registry,
            {"/livez": self._live, "/readyz": self._ready},
            host=settings.http_host,
            port=settings.http_port,
            kind="notifier",
        )

    async def run(self) -> None:
        """Takes ends and posts webhooks until a signal."""
        stop = asyncio.Event()
        on_signals(stop.set)
        settings = self._settings
        poster = Poster(
            allowed=settings.allowed,
            timeout_seconds=settings.post_timeout_seconds,
            max_connections=settings.max_posts,
        )
        connection = connect_async(settings.connection_url, block_seconds=READ_SECONDS)
        self._server.start()
        try:
            async with connection, poster, asyncio.TaskGroup() as group:
                work = [
                    one
                    for shard in range(settings.shards)
                    for one in self._of_shard(connection, poster, shard)
                ]
                work += [self._show_life(), self._tell_ready()]
                tasks = [group.create_task(one) for one in work]
                await stop.wait()
                self._is_stopping = True
                # Attempts that have begun are finished; each has its timeout.
                for task in tasks:
                    task.cancel()
        finally:
            self._server.stop()
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
        self._circuits.append(deliveries.circuits)
        intake = EndIntake(
            self._brokers,
            broker,
            deliveries,
            self._endpoints,
            self._consumer,
            metrics=self.metrics,
            take_over_seconds=settings.take_over_seconds,
            replay=settings.replay,
        )
        self._intakes.append(intake)
        sending = Sending(
            settings,
            deliveries,
            self._endpoints,
            self._circuits,
            poster,
            shard=shard,
            metrics=self.metrics,
        )
        return intake.run(), sending.run()

    async def _tell_ready(self) -> None:
        for intake in self._intakes:
            await intake.has_begun.wait()
        _log.info(
            "notifier ready",
            queue=self._settings.queue,
            tenants=len(self._endpoints),
            http_host=self._settings.http_host,
            http_port=self._server.port,
        )

    async def _show_life(self) -> None:
        while True:
            self._alive_at = time.monotonic()
            await asyncio.sleep(SIGN_SECONDS)

    def _live(self) -> tuple[bool, dict[str, Any]]:
        seconds = time.monotonic() - self._alive_at
        return seconds < HANGING_SECONDS, {"seconds_since_turn": round(seconds, 3)}

    def _ready(self) -> tuple[bool, dict[str, Any]]:
        seconds = self.metrics.seconds_since_contact
        begun = [one for one in self._intakes if one.has_begun.is_set()]
        has_begun = len(begun) == self._settings.shards
        return has_begun and not self._is_stopping, {"seconds_since_contact": round(seconds, 3)}
