"""What may take long for one caller does not hold up the others of the same broker."""

import asyncio
import threading

import pytest

from quire import Broker, BrokerUnavailable, SharedReadsBroker, connect, connect_async
from quire.queue.producer_async import AsyncProducer
from quire.queue.publish.commit import CommitItem
from quire.queue.request.claims import Claim
from quire.transport.retrying_async import MAX_CALLS
from quire.transport.script_runner import ScriptRunner
from quire.transport.script_runner_async import AsyncScriptRunner
from tests.quire.builders import make_request
from tests.quire.waiting import PATIENCE_SECONDS


@pytest.mark.real_redis
def test_submits_that_take_long_do_not_hold_up_the_reads_of_many_logs(real_server, monkeypatch):
    """One gateway follows more logs than one XREAD takes, and its submits wait for the disk."""
    send, released = AsyncScriptRunner._pipeline, asyncio.Event()
    all_sent = asyncio.Barrier(MAX_CALLS + 1)

    async def slow(*arguments: object) -> object:
        await all_sent.wait()
        await released.wait()
        return await send(*arguments)

    async def run() -> None:
        async with connect_async(real_server.url) as connection:
            broker = AsyncProducer(connection, queue="reads")
            (request,) = await broker.submit_many([make_request(id="read")])
            await broker.cancel(request.request_id)
            monkeypatch.setattr(AsyncScriptRunner, "_pipeline", slow)
            submits = [
                asyncio.create_task(broker.submit_many([make_request(id=f"slow-{n}")]))
                for n in range(MAX_CALLS)
            ]
            await all_sent.wait()
            many = {request.request_id: 0} | {f"other-{n}": 0 for n in range(600)}
            async with asyncio.timeout(PATIENCE_SECONDS):
                reads = await broker.read_output(many, block_seconds=2.0)
            assert set(reads) == {request.request_id}
            released.set()
            await asyncio.gather(*submits)
            await broker.close()

    asyncio.run(run())


@pytest.mark.real_redis
def test_the_submits_of_many_threads_do_not_wait_for_each_other(real_connection, monkeypatch):
    send, together = ScriptRunner._pipeline, threading.Barrier(MAX_CALLS + 1)

    def met(*arguments: object) -> object:
        together.wait(PATIENCE_SECONDS)
        return send(*arguments)

    monkeypatch.setattr(ScriptRunner, "_pipeline", met)
    broker: Broker = SharedReadsBroker(real_connection, queue="submits")
    threads = [
        threading.Thread(target=broker.submit, args=[make_request(id=f"at-once-{n}")])
        for n in range(MAX_CALLS + 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(broker.queue_depth().values()) == MAX_CALLS + 1


def test_a_server_that_is_gone_is_asked_once_for_all_shards_of_a_commit():
    with connect("redis://127.0.0.1:1/0") as connection:
        brokers = [Broker(connection, shard=shard, retry_seconds=0.0) for shard in range(3)]
        (broker, first), *others = [
            (broker, [CommitItem(Claim(f"r-{number}", 1, f"owner-{number}"), 0, (1,), "a")])
            for number, broker in enumerate(brokers)
        ]
        one, *rest = broker.commit_with(first, others)
    assert isinstance(one, BrokerUnavailable)
    assert all(other is one for other in rest)
