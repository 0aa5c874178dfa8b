"""An endpoint that fails is left alone, and gets all its webhooks at once when it is back."""

import asyncio
import contextlib
import ipaddress
import json
import time
from collections.abc import AsyncIterator, Callable

import pytest
from standardwebhooks import Webhook

from quire.keys import Keys
from quire.transport.connection_async import connect_async
from service.notifier import circuits
from service.notifier.circuits import FAILURES, MAX_RANK
from service.notifier.deliveries import Deliveries
from service.notifier.endpoints import Endpoint
from service.notifier.events import Event
from service.notifier.metrics import NotifierMetrics
from service.notifier.posting import Poster
from service.notifier.sending import MAX_POSTS_PER_ENDPOINT, Sending
from service.notifier.settings import NotifierSettings
from tests.service.builders import Queue, eventually
from tests.service.notifier.conftest import SECRET, Receiver

pytestmark = pytest.mark.real_redis

NUM_NOTIFIERS, NUM_WEBHOOKS = 2, 20

#: Longer than a test: only `pass_pause` ends a pause.
OPEN_SECONDS = 600.0


class Shard:
    """The webhooks and circuits of one shard, behind the back of the notifiers."""

    def __init__(self, queue: Queue, number: int) -> None:
        self.keys = Keys(queue.name, number)
        self._connection = queue.connection
        self._due = f"{self.keys.prefix}:hook:due"
        self._circuits = f"{self.keys.prefix}:hook:circuits"

    @property
    def opens_ms(self) -> float:
        """When the circuit of the endpoint lets an attempt through; 0 for a closed one."""
        score = self._connection.zscore(self._circuits, "acme") or 0.0
        return score if score >= FAILURES else 0.0

    def waits(self, num: int) -> bool:
        """Whether so many webhooks wait for an open circuit."""
        at = self.opens_ms
        is_shut = at > 1000 * time.time()
        return is_shut and self._connection.zcount(self._due, at, at + MAX_RANK) == num

    def pass_pause(self) -> None:
        """The circuit lets an attempt through, and all that waited for it are due."""
        earlier = 1000 - self.opens_ms
        with self._connection.pipeline() as pipeline:
            pipeline.zincrby(self._circuits, earlier, "acme")
            for member in self._connection.zrange(self._due, 0, -1):
                pipeline.zincrby(self._due, earlier, member)
            pipeline.execute()

    @property
    def is_empty(self) -> bool:
        return not self._connection.exists(self._due, self._circuits)


@contextlib.asynccontextmanager
async def notifiers(queue: Queue, receiver: Receiver, shards: list[Shard]) -> AsyncIterator[None]:
    """NUM_NOTIFIERS senders of each shard, and NUM_WEBHOOKS in each."""
    settings = NotifierSettings(first_pause_seconds=0.01, longest_pause_seconds=0.05)
    endpoint = Endpoint("acme", f"{receiver.url}/acme", (Webhook(SECRET),), frozenset())
    networks = [ipaddress.ip_network("127.0.0.0/8")]
    connection = connect_async(queue.url)
    poster = Poster(allowed=networks, timeout_seconds=60.0, max_connections=64)
    async with connection, poster:
        tasks = []
        for _ in range(NUM_NOTIFIERS):
            own = [
                Deliveries(connection, shard.keys, most_per_tenant=99, life_ms=60_000)
                for shard in shards
            ]
            for number, deliveries in enumerate(own):
                sending = Sending(
                    settings,
                    deliveries,
                    {"acme": endpoint},
                    [one.circuits for one in own],
                    poster,
                    shard=number,
                    metrics=NotifierMetrics(num_open_circuits=int),
                )
                tasks.append(asyncio.create_task(sending.run()))
        for number, deliveries in enumerate(own):
            for n in range(NUM_WEBHOOKS):
                name = f"msg_{number}_{n}"
                created_ms = int(1000 * time.time())
                await deliveries.add(Event(name, "acme", "t", json.dumps({"n": n}), created_ms))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def until(read: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(eventually, read, what)


def test_after_one_attempt_that_succeeds_all_others_go_at_once(queue, receiver, monkeypatch):
    monkeypatch.setattr(circuits, "OPEN_SECONDS", OPEN_SECONDS)
    shard = Shard(queue, 0)
    receiver.answer = lambda path: 500

    async def play() -> None:
        async with notifiers(queue, receiver, [shard]):
            await until(lambda: shard.waits(NUM_WEBHOOKS), "all wait")
            num = len(receiver.ids)
            assert FAILURES <= num < FAILURES + NUM_NOTIFIERS * MAX_POSTS_PER_ENDPOINT
            shard.pass_pause()
            await until(lambda: shard.waits(NUM_WEBHOOKS), "all wait again")
            assert len(receiver.ids) == num + 1
            receiver.answer = lambda path: 204
            receiver.may_answer.clear()
            shard.pass_pause()
            await until(lambda: shard.waits(NUM_WEBHOOKS - 1), "all wait but the one that is tried")
            await until(lambda: len(receiver.ids) == num + 2, "one is tried")
            assert receiver.ids[num] != receiver.ids[num + 1], "it is another one"
            receiver.may_answer.set()
            await until(lambda: shard.is_empty, "all are taken")
            assert len({*receiver.ids[num + 1 :]}) == NUM_WEBHOOKS

    asyncio.run(play())


def test_an_endpoint_is_back_for_all_shards(queue, receiver, monkeypatch):
    monkeypatch.setattr(circuits, "OPEN_SECONDS", OPEN_SECONDS)
    shards = [Shard(queue, number) for number in range(2)]
    receiver.answer = lambda path: 500

    async def play() -> None:
        async with notifiers(queue, receiver, shards):
            for shard in shards:
                await until(lambda one=shard: one.waits(NUM_WEBHOOKS), "all wait")
            receiver.answer = lambda path: 204
            shards[0].pass_pause()
            await until(lambda: all(shard.is_empty for shard in shards), "all are taken")

    asyncio.run(play())
