"""Many logs read by one process: few connections, no reader held up by another, no lost news."""

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire import Broker, BrokerUnavailable, Client, ProtocolError, QueueFull, State
from quire.client.client_async import AsyncClient
from quire.client.reader import SharedReadsBroker
from quire.queue import producer_async
from quire.queue.broker_async import AsyncBroker
from quire.queue.submit import messages
from quire.queue.submit.routing import Parting
from quire.queue.submit.submit import Submitted
from quire.testing.in_memory import FakeQuire, FakeWorker
from quire.transport.connection import connect
from quire.transport.connection_async import connect_async
from quire.transport.retrying_async import MAX_CALLS
from tests.quire.builders import (
    claim_next,
    make_item,
    make_request,
    remove_queue,
    text_of,
    token_at,
)
from tests.quire.loop_face import async_twin
from tests.quire.proxy import wire_to

NUM_STREAMS = 1000
NUM_TOKENS = 4
#: As long as the socket allows: a newcomer that is not read for at once is told from a slow one.
BLOCKED_SECONDS = 4.0


class Publisher:
    """A worker without an engine: claims what is queued, then publishes for all, token by token."""

    def __init__(self, broker):
        self._broker = broker
        self._claims = []

    def claim(self, count):
        while len(self._claims) < count:
            entries = self._broker.peek(count=256, block_seconds=1)
            self._claims += [answer.claim for answer in self._broker.claim(entries)]

    def publish(self):
        for index in range(NUM_TOKENS):
            self._broker.commit([make_item(claim, index, index + 1) for claim in self._claims])
        ends = [make_item(c, NUM_TOKENS, NUM_TOKENS, final=True) for c in self._claims]
        self._broker.commit(ends)

    def publish_in_thread(self):
        thread = threading.Thread(target=self.publish, daemon=True)
        thread.start()
        return thread


def connections_of(broker):
    return len(broker.connection.client_list())


async def text_streamed(handle):
    return "".join([chunk.text async for chunk in handle.stream()])


WHOLE_TEXT = "".join(map(text_of, range(NUM_TOKENS)))


@pytest.mark.real_redis
def test_a_thousand_streams_of_one_loop_are_read_through_a_few_connections(
    real_server, real_broker
):
    async def read_all():
        async with AsyncClient(real_server.url, queue=real_broker.keys.queue) as client:
            handles = await client.submit_many([{"prompt": [1]}] * NUM_STREAMS)
            publisher = Publisher(real_broker)
            await asyncio.to_thread(publisher.claim, NUM_STREAMS)
            before = connections_of(real_broker)
            publisher.publish_in_thread()
            texts = await asyncio.gather(*map(text_streamed, handles))
            return texts, connections_of(real_broker) - before

    texts, new_connections = asyncio.run(read_all())
    assert texts == [WHOLE_TEXT] * NUM_STREAMS
    assert new_connections <= 12


@pytest.mark.real_redis
def test_a_thousand_streams_in_threads_are_read_through_a_few_connections(real_server, real_broker):
    with connect(real_server.url) as connection:
        client = Client(SharedReadsBroker(connection, queue=real_broker.keys.queue))
        handles = client.submit_many([{"prompt": [1]}] * NUM_STREAMS)
        publisher = Publisher(real_broker)
        publisher.claim(NUM_STREAMS)
        before = connections_of(real_broker)
        publisher.publish_in_thread()
        with ThreadPoolExecutor(200) as threads:
            results = list(threads.map(lambda handle: handle.result(timeout=60), handles))
        assert [result.text for result in results] == [WHOLE_TEXT] * NUM_STREAMS
        assert connections_of(real_broker) - before <= 12


def test_a_reader_that_does_not_come_back_holds_up_nobody_and_misses_nothing(connection, broker):
    async def scenario():
        client = AsyncClient(async_twin(connection), queue=broker.keys.queue)
        handles = await client.submit_many([{"prompt": [1]}] * 20)
        publisher = Publisher(broker)
        publisher.claim(20)
        slow = handles[0].stream()
        publishing = publisher.publish_in_thread()
        first = await anext(slow)
        others = await asyncio.gather(*map(text_streamed, handles[1:]))
        await asyncio.to_thread(publishing.join)
        # Nothing was kept for it meanwhile: its rest is read from the log.
        assert not client.brokers[0]._reader._waits
        rest = "".join([chunk.text async for chunk in slow])
        await client.close()
        return first.text + rest, others

    slow, others = asyncio.run(scenario())
    assert slow == WHOLE_TEXT
    assert others == [WHOLE_TEXT] * 19


def until(condition):
    """Returns as soon as the condition holds; a test that waits in vain runs into its timeout."""
    while not condition():
        time.sleep(0.001)


def test_a_new_reader_in_the_loop_does_not_wait_for_the_read_that_is_blocked(connection, broker):
    """The newcomer has less time than the blocked read lasts."""
    silent, busy = Client(broker).submit_many([{"prompt": [1]}] * 2)
    claims = [claim_next(broker).claim for _ in range(2)]

    async def scenario():
        client = AsyncClient(async_twin(connection), queue=broker.keys.queue)
        reader = client.brokers[0]._reader
        reader._reads._longest_block = BLOCKED_SECONDS
        waiting = asyncio.create_task(text_streamed(client.attach(silent.request_id)))
        await asyncio.to_thread(until, lambda: reader._is_blocked)
        newcomer = asyncio.create_task(anext(client.stream(busy.request_id)))
        await asyncio.to_thread(until, lambda: busy.request_id in reader._waits._by_request)
        began = time.monotonic()
        broker.commit([make_item(claims[1], 0, 1)])
        await newcomer
        seconds = time.monotonic() - began
        await client.close()
        with pytest.raises(BrokerUnavailable, match="closed"):
            await waiting
        return seconds

    assert asyncio.run(scenario()) < BLOCKED_SECONDS - 1


def test_a_new_reader_in_a_thread_does_not_wait_for_the_read_that_is_blocked(connection, broker):
    shared = SharedReadsBroker(connection, queue=broker.keys.queue)
    shared._reader._reads._longest_block = BLOCKED_SECONDS
    silent, busy = Client(broker).submit_many([{"prompt": [1]}] * 2)
    claims = [claim_next(broker).claim for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(Client(shared).attach(silent.request_id).result)
        until(lambda: shared._reader._is_blocked)
        newcomer = pool.submit(next, Client(shared).stream(busy.request_id))
        until(lambda: busy.request_id in shared._reader._waits._by_request)
        began = time.monotonic()
        broker.commit([make_item(claims[1], 0, 1)])
        assert newcomer.result().token_ids == (token_at(0),)
        assert time.monotonic() - began < BLOCKED_SECONDS - 1
        broker.commit([make_item(claims[0], 0, 1, final=True)])
        assert waiting.result().state is State.COMPLETED


def test_two_readers_at_different_places_of_one_log_each_get_what_they_lack(connection, broker):
    handle = Client(broker).submit("x")
    claim = claim_next(broker).claim
    broker.commit([make_item(claim, 0, 2)])

    async def scenario():
        client = AsyncClient(async_twin(connection), queue=broker.keys.queue)
        ahead, behind = client.stream(handle.request_id, after=1), client.stream(handle.request_id)
        texts = [(await anext(ahead)).text, (await anext(behind)).text]
        both = asyncio.gather(anext(ahead), anext(behind))
        waits = client.brokers[0]._reader._waits
        await asyncio.to_thread(until, lambda: bool(waits))
        broker.commit([make_item(claim, 2, 4)])
        texts += [chunk.text for chunk in await both]
        await client.close()
        return texts

    assert asyncio.run(scenario()) == ["b", "ab", "cd", "cd"]


def test_a_damaged_log_is_an_error_for_its_own_reader_only(connection, broker):
    async def scenario():
        client = AsyncClient(async_twin(connection), queue=broker.keys.queue)
        bad, good = await client.submit_many([{"prompt": [1]}] * 2)
        publisher = Publisher(broker)
        publisher.claim(2)
        results = asyncio.gather(text_streamed(bad), text_streamed(good), return_exceptions=True)
        waits = client.brokers[0]._reader._waits
        await asyncio.to_thread(until, lambda: len(waits._by_request) == 2)
        connection.xadd(broker.keys.output(bad.request_id), {"not": "ours"}, id="9-9")
        connection.expire(broker.keys.output(bad.request_id), 60)
        publisher._claims = [c for c in publisher._claims if c.request_id == good.request_id]
        publisher.publish()
        answers = await results
        await client.close()
        return answers

    error, text = asyncio.run(scenario())
    assert isinstance(error, ProtocolError)
    assert text == WHOLE_TEXT


def test_a_call_that_can_never_succeed_says_so_and_its_neighbours_are_answered(connection, broker):
    connection.set(broker.keys.request("bad"), "foreign", ex=60)

    async def scenario():
        async with AsyncClient(async_twin(connection), queue=broker.keys.queue) as client:
            (other,) = client.brokers
            with pytest.raises(ProtocolError, match="would fail again"):
                await client.submit_many([
                    {"prompt": [1], "request_id": "good"}, {"prompt": [1], "request_id": "bad"},
                ])  # fmt: skip
            with pytest.raises(ProtocolError):
                await other.cancel("bad")

    asyncio.run(scenario())
    connection.delete(broker.keys.request("bad"))
    assert broker.status("good").state is State.QUEUED


@pytest.mark.real_redis
def test_a_submit_whose_reply_was_lost_enqueues_once(real_server, real_broker):
    async def scenario(proxy):
        async with AsyncClient(proxy.url, queue=real_broker.keys.queue) as client:
            await client.submit("x")
            proxy.lose_reply()
            await client.submit("y")
            return proxy.num_lost

    with wire_to(real_server.url) as proxy:
        assert asyncio.run(scenario(proxy)) == 1
    assert sum(real_broker.queue_depth().values()) == 2


def test_a_dead_server_is_a_typed_error_for_calls_and_for_waiting_readers():
    async def scenario():
        connection = connect_async("redis://127.0.0.1:1/0")
        broker = AsyncBroker(connection, retry_seconds=0.05)
        client = AsyncClient(broker)
        with pytest.raises(BrokerUnavailable):
            await client.submit("x")
        with pytest.raises(BrokerUnavailable):
            await broker.read_output({"a": 0}, block_seconds=1.0)
        await broker.close()
        await connection.aclose()

    asyncio.run(scenario())


def test_all_callers_learn_of_a_dead_server_together():
    """However many they are: who waits for a turn does not wait for the tries of others, too."""
    retry_seconds = 1.0

    async def scenario():
        broker = AsyncBroker(connect_async("redis://127.0.0.1:1/0"), retry_seconds=retry_seconds)
        began = time.monotonic()
        calls = [broker.now_ms() for _ in range(32 * MAX_CALLS)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        seconds = time.monotonic() - began
        await broker.close()
        assert {type(end) for end in ends} == {BrokerUnavailable}
        return seconds

    assert asyncio.run(scenario()) < 8 * retry_seconds  # By turns it were twenty.


def test_a_full_queue_names_what_was_accepted_all_the_same(connection, broker):
    async def scenario():
        client = AsyncClient(async_twin(connection), queue=broker.keys.queue, max_backlog=2)
        with pytest.raises(QueueFull) as caught:
            await client.submit_many([{"prompt": [1], "request_id": name} for name in "abc"])
        await client.close()
        return caught.value.accepted

    assert asyncio.run(scenario()) == ("a", "b")


def test_the_fake_queue_has_an_asynchronous_client():
    async def scenario(fake):
        async with fake.async_client() as client:
            return (await (await client.submit("x")).result(timeout=10)).text

    with FakeQuire(answer=lambda request: "async") as fake:
        assert asyncio.run(scenario(fake)) == "async"


@pytest.mark.real_redis
def test_a_queue_of_many_shards_is_one_queue_for_its_client(real_server, real_broker):
    brokers = [
        Broker(real_broker.connection, queue=real_broker.keys.queue, shard=shard)
        for shard in range(3)
    ]

    async def scenario():
        async with AsyncClient(real_server.url, queue=real_broker.keys.queue, shards=3) as client:
            handles = await client.submit_many([{"prompt": str(n)} for n in range(30)])
            results = await asyncio.gather(*(handle.result(timeout=20) for handle in handles))
            again = await client.result(handles[0].request_id)
            group = await client.submit_many([{"prompt": "member"}] * 12, group="g")
            members = [completion.text async for completion in group.results(timeout=20)]
            assert (members, await group.counts()) == (["member"] * 12, {State.COMPLETED: 12})
            return [result.text for result in results], again.text

    with contextlib.ExitStack() as workers:
        for broker in brokers:
            broker.ensure_groups()
            workers.enter_context(FakeWorker(broker, lambda request: request.body["prompt"]))
        texts, again = asyncio.run(scenario())
    assert texts == [str(n) for n in range(30)]
    assert again == "0"
    for broker in brokers[1:]:
        remove_queue(broker.connection, broker)


def test_one_shard_that_is_full_does_not_hide_what_the_others_took():
    requests = [make_request(id=str(n)) for n in range(6)]
    parting = Parting(requests, 2)
    parts = dict(parting.parts())
    assert sorted(parts) == [0, 1] and sum(map(len, parts.values())) == 6
    taken = [Submitted(request.id, State.QUEUED, created=True) for request in parts[0]]
    parting.answered(0, taken)
    other = Submitted(parts[1][0].id, State.QUEUED, created=True)
    parting.failed(QueueFull("full", limit="tokens").with_submitted([other]))
    with pytest.raises(QueueFull) as caught:
        parting.answers()
    assert caught.value.limit == "tokens"
    assert set(caught.value.accepted) == {one.request_id for one in (*taken, other)}


def test_a_loop_gets_on_while_many_requests_are_made_ready(connection, broker, monkeypatch):
    """A service that submits a hundred thousand still answers the others it has."""
    turns, seen = [0], {"build_request": set(), "submit_call": set()}

    def watched(module, name):
        make = getattr(module, name)

        def make_and_look(*arguments, **options):
            seen[name].add(turns[0])
            return make(*arguments, **options)

        monkeypatch.setattr(module, name, make_and_look)

    watched(messages, "build_request")
    watched(producer_async, "submit_call")

    async def others():
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def scenario():
        client = AsyncClient(async_twin(connection), queue=broker.keys.queue)
        task = asyncio.create_task(others())
        handles = await client.submit_many([{"prompt": "x"}] * 3)
        task.cancel()
        await client.close()
        return len(handles)

    monkeypatch.setattr("quire.transport.turns.TURN_SECONDS", 0.0)
    assert asyncio.run(scenario()) == 3
    assert [len(parts) for parts in seen.values()] == [3, 3]
