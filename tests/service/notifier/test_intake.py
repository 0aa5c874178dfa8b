"""Which webhooks a notifier keeps of the ends that it handles, whichever notifier handles which."""

import asyncio
import json

import pytest

from quire.queue.broker import Broker
from quire.queue.broker_async import AsyncBroker
from quire.queue.ends.telling import Delivery
from quire.transport.connection import connect
from quire.transport.connection_async import connect_async
from service.notifier.deliveries import Deliveries
from service.notifier.endpoints import Endpoint
from service.notifier.events import GROUP_ENDED, REQUEST_EVENTS
from service.notifier.intake import GROUP, EndIntake
from service.notifier.metrics import NotifierMetrics
from tests.quire.builders import claim_next, make_request, pass_moment
from tests.service.builders import PATIENCE_SECONDS, private_redis

pytestmark = pytest.mark.real_redis

TENANTS = ("acme", "blue", "default")


class Notifiers:
    """Intakes of one shard each; `handle` posts every webhook at once."""

    def __init__(self, connection, queue: str, *, shards: int = 1) -> None:
        self._connection = connection
        self.brokers = [AsyncBroker(connection, queue=queue, shard=n) for n in range(shards)]

    def make(self, *, shard: int = 0, events=(GROUP_ENDED,)) -> tuple[EndIntake, Deliveries]:
        """A new one, which takes no end over from others."""
        wanted = frozenset(events)
        endpoints = {name: Endpoint(name, "https://a.example", (), wanted) for name in TENANTS}
        broker, metrics = self.brokers[shard], NotifierMetrics(num_open_circuits=int)
        deliveries = Deliveries(self._connection, broker.keys, most_per_tenant=99, life_ms=60_000)
        intake = EndIntake(
            self.brokers,
            broker,
            deliveries,
            endpoints,
            "one",
            metrics=metrics,
            take_over_seconds=1e6,
        )
        return intake, deliveries

    async def handle(self, delivery: Delivery, **settings) -> list:
        """The webhooks that a new notifier posts: (tenant, body)."""
        intake, deliveries = self.make(**settings)
        await intake.keep(delivery)
        taken = await deliveries.take(count=99, lease_seconds=60)
        for one in taken.pending:
            await deliveries.forget(one.tenant, one.webhook_id)
        return [(one.tenant, json.loads(one.body)) for one in taken.pending]


def handled(redis_url, queue, *deliveries, shards=1, events=(GROUP_ENDED,)) -> list[list]:
    """What is posted for each of these deliveries, (shard, delivery), one after the other."""

    async def work():
        async with connect_async(redis_url) as connection:
            notifiers = Notifiers(connection, queue, shards=shards)
            return [
                await notifiers.handle(delivery, shard=shard, events=events)
                for shard, delivery in deliveries
            ]

    return asyncio.run(work())


def ends_of(broker) -> list[Delivery]:
    """A delivery for each end of this shard alone."""
    return [Delivery([end], [end.position]) for end in broker.told(after="0-0")]


def end(broker: Broker, name: str, *, tenant: str) -> None:
    broker.submit(make_request(id=name, tenant=tenant))
    broker.cancel(name)
    pass_moment(broker)


def test_each_end_of_a_group_tells_the_end_that_came_last(queue, redis_url):
    broker = queue.broker
    for name, tenant in (("g~a", "acme"), ("g~b", "blue"), ("g~c", "default"), ("g~d", "blue")):
        end(broker, name, tenant=tenant)
    last = broker.told(after="0-0")[-1]
    posts = handled(redis_url, broker.keys.queue, *((0, one) for one in reversed(ends_of(broker))))
    ((tenant, body),) = posts[0]
    assert (tenant, body["data"]["counts"]) == ("blue", {"cancelled": 4})
    assert body["created_at"] == pytest.approx(last.ended_at, abs=1.1)
    assert posts == [posts[0]] * 4


def test_so_do_the_notifiers_of_other_shards(queue, redis_url):
    shards = [Broker(queue.connection, queue=queue.broker.keys.queue, shard=n) for n in range(2)]
    end(shards[0], "g~a", tenant="acme")
    end(shards[1], "g~b", tenant="blue")
    first, second = handled(
        redis_url,
        queue.broker.keys.queue,
        *((shard, one) for shard in range(2) for one in ends_of(shards[shard])),
        shards=2,
    )
    assert first == second
    assert [tenant for tenant, _ in first] == ["blue"]
    for key in queue.connection.scan_iter(match=f"{shards[1].keys.prefix}:*"):
        queue.connection.delete(key)


def test_a_group_that_ends_again_has_another_id(queue, redis_url):
    broker = queue.broker
    end(broker, "g~a", tenant="acme")
    broker.submit(make_request(id="g~b", tenant="acme"))
    broker.dead_letter(claim_next(broker).claim, "undecodable")
    (letter,) = broker.dead_letters()
    first, _ = ends_of(broker)
    ((before,),) = handled(redis_url, broker.keys.queue, (0, first))
    pass_moment(broker)
    broker.requeue(letter, keep_tokens=True)
    assert handled(redis_url, broker.keys.queue, (0, first)) == [[]]
    # As before, so that only the time of the end differs.
    broker.dead_letter(claim_next(broker).claim, "undecodable")
    ((after,),) = handled(redis_url, broker.keys.queue, (0, first))
    assert before[1]["data"] == after[1]["data"]
    assert before[1]["id"] != after[1]["id"]


def test_a_last_end_that_an_earlier_version_has_written_goes_to_its_tenant(queue, redis_url):
    broker = queue.broker
    end(broker, "g~a", tenant="acme")
    (delivery,) = ends_of(broker)
    *_, ends = broker.keys.of_group("g")
    queue.connection.delete(ends)
    queue.connection.xadd(ends, {"id": "g~a", "state": "cancelled"})
    queue.connection.expire(ends, 60)
    (end_of_group,) = broker.read_ends("g")
    assert (end_of_group.request_id, end_of_group.tenant) == ("g~a", "")
    (((tenant, body),),) = handled(redis_url, broker.keys.queue, (0, delivery))
    assert (tenant, body["data"]["counts"]) == ("acme", {"cancelled": 1})


@pytest.mark.parametrize("loss", ["expired", "damaged", "another type"])
def test_a_group_that_cannot_be_read_is_not_told_and_holds_up_nothing(
    queue, redis_url, loss, caplog
):
    broker = queue.broker
    end(broker, "g~a", tenant="acme")
    (delivery,) = ends_of(broker)
    counts, *_ = keys = broker.keys.of_group("g")
    if loss == "damaged":
        queue.connection.hset(counts, "cancelled", "many")
    else:
        queue.connection.delete(*keys)
    if loss == "another type":
        queue.connection.set(counts, "mine", ex=60)
    events = (*REQUEST_EVENTS, GROUP_ENDED)
    (posts,) = handled(redis_url, broker.keys.queue, (0, delivery), events=events)
    assert [body["type"] for _, body in posts] == ["request.cancelled"]
    assert "a webhook is dropped" in caplog.text


def test_ends_that_cannot_be_kept_without_memory_are_kept_once_there_is_some(caplog, monkeypatch):
    monkeypatch.setattr("service.notifier.intake.AGAIN_SECONDS", 0.01)
    names = [f"{number}" for number in range(5)]
    with private_redis() as server, connect(server.url) as admin:
        broker = Broker(admin)
        broker.ensure_groups()
        broker.deliver(GROUP, "another")
        for name in names:
            end(broker, name, tenant="acme")
        admin.config_set("maxmemory", 1)

        async def work():
            async with connect_async(server.url) as connection:
                intake, deliveries = Notifiers(connection, "default").make(events=REQUEST_EVENTS)
                running = asyncio.create_task(intake.run())
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while "the ends cannot be read" not in caplog.text:
                        await asyncio.sleep(0.01)
                    admin.config_set("maxmemory", 0)
                    while (taken := await deliveries.take(count=0, lease_seconds=60)).num < len(
                        names
                    ):
                        await asyncio.sleep(0.01)
                running.cancel()
                return taken.num

        assert asyncio.run(work()) == len(names)
