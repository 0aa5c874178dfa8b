"""Posts the webhooks of one shard that are due, and decides when each is tried again."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import structlog
from redis.exceptions import RedisError

from service.notifier.circuits import Circuits
from service.notifier.deliveries import Deliveries, Pending, Taken
from service.notifier.endpoints import Endpoint
from service.notifier.metrics import NotifierMetrics
from service.notifier.posting import Poster
from service.notifier.settings import NotifierSettings

#: How often a notifier looks for webhooks that are due.
LOOK_SECONDS = 0.25

#: The most webhooks that are posted to one endpoint at once, per shard.
MAX_POSTS_PER_ENDPOINT = 4

#: The pause after an error of Redis.
AGAIN_SECONDS = 1.0

#: A notifier has a webhook for so many times the longest time of an attempt, and a second more.
LEASE_TIMEOUTS = 2

#: Each pause is so many times the one before it.
GROWTH = 4.0

_log = structlog.get_logger("service.notifier")


class Sending:
    """Posts the webhooks of one shard, named by its number, that are due.

    `circuits` are those of all shards: they have the same endpoints.
    """

    def __init__(
        self,
        settings: NotifierSettings,
        deliveries: Deliveries,
        endpoints: Mapping[str, Endpoint],
        circuits: Sequence[Circuits],
        poster: Poster,
        *,
        shard: int,
        metrics: NotifierMetrics,
    ) -> None:
        self._settings = settings
        self._deliveries = deliveries
        self._endpoints = endpoints
        self._circuits = circuits
        self._poster = poster
        self._shard = shard
        self._metrics = metrics
        self._busy = Counter[str]()

    async def run(self) -> None:
        """Runs until it is cancelled, and finishes the attempts that have begun."""
        most = self._settings.max_posts
        lease_seconds = LEASE_TIMEOUTS * self._settings.post_timeout_seconds + 1.0
        running = set[asyncio.Task[None]]()
        try:
            while True:
                taken = Taken()
                try:
                    taken = await self._deliveries.take(
                        count=most - len(running), lease_seconds=lease_seconds
                    )
                    self._metrics.note_waiting(self._shard, num_due=taken.num_due, num=taken.num)
                except RedisError as error:
                    _log.warning("webhooks cannot be read", error=str(error))
                    await asyncio.sleep(AGAIN_SECONDS)
                running |= {asyncio.create_task(self._deliver(one)) for one in taken.pending}
                if not taken.pending:
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
            # The webhook is due again after its lease.
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
            self._metrics.count_given_up("time" if endpoint else "endpoint")
            return
        circuits = self._deliveries.circuits
        if not await circuits.enter(tenant, pending.member, attempts=pending.attempts):
            return
        failure = await self._poster.post(endpoint, pending.webhook_id, pending.body)
        if failure is None:
            self._metrics.count_taken(pending.age_seconds)
            await self._deliveries.forget(tenant, pending.webhook_id)
            for one in self._circuits:
                if one is circuits or one.num_open:
                    await one.close(tenant)
            return
        self._metrics.count_failure(failure.kind)
        if await circuits.fail(tenant):
            _log.warning("an endpoint fails again and again", tenant=tenant, reason=failure.reason)
        pause = pause_after(pending.attempts, settings=settings)
        about |= {"reason": failure.reason, "again_seconds": round(pause, 1)}
        _log.info("a webhook is not taken", **about)
        await self._deliveries.defer(pending, seconds=pause, was_tried=True)


def pause_after(attempts: int, *, settings: NotifierSettings) -> float:
    """Seconds until the next attempt, after so many earlier ones and one more.

    Grows up to a limit. Half of it is random, so that what failed together comes back apart.
    """
    # With a bound on the exponent, no number is too large for a float.
    pause = settings.first_pause_seconds * GROWTH ** min(attempts, 30)
    return min(pause, settings.longest_pause_seconds) * random.uniform(0.5, 1.0)  # noqa: S311
