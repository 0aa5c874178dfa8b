"""A reader that dies of a mistake of ours leaves nobody waiting, and another takes its place."""

import asyncio
import gc
import os
import signal
import threading
import time

import pytest
import redis.client

from quire import BrokerUnavailable, Client, QuireError, connect
from quire.client.client_async import AsyncClient
from quire.client.reader import SharedReadsBroker
from quire.transport.connection_async import connect_async
from tests.quire.builders import claim_next, make_item, text_of
from tests.quire.loop_face import async_twin


class Mistake(Exception):
    """What no reader expects."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_fails_those_who_wait_and_is_replaced(connection, broker, monkeypatch):
    shared = SharedReadsBroker(connection, queue=broker.keys.queue)
    handle = Client(shared).submit("x")
    claim = claim_next(broker).claim
    dying: list[threading.Thread] = []

    def dies(*_: object) -> None:
        dying.append(threading.current_thread())
        raise Mistake

    with monkeypatch.context() as broken:
        broken.setattr("quire.client.reader._Reader._read_once", dies)
        with pytest.raises(BrokerUnavailable, match="has ended"):
            shared.read_output({handle.request_id: 0}, block_seconds=30)
    # Its exception is reported when it has ended: here, and not in the middle of another test.
    for thread in dying:
        thread.join()
    broker.commit([make_item(claim, 0, 1, final=True)])
    assert handle.result(timeout=30).text == text_of(0)


def test_a_task_that_dies_fails_those_who_wait_and_is_replaced(connection, broker, monkeypatch):
    async def scenario():
        client = AsyncClient(async_twin(connection), queue=broker.keys.queue)
        handle = await client.submit("x")
        claim = claim_next(broker).claim
        mine = client.brokers[0]
        with monkeypatch.context() as broken:
            broken.setattr("quire.queue.reader_async.AsyncReader._read_once", raising_mistake)
            with pytest.raises(BrokerUnavailable, match="has ended"):
                await mine.read_output({handle.request_id: 0}, block_seconds=30)
        broker.commit([make_item(claim, 0, 1, final=True)])
        completion = await handle.result(timeout=30)
        await client.close()
        return completion.text

    assert asyncio.run(scenario()) == text_of(0)
    # The dead task complains when it is collected: here, and not in the middle of another test.
    gc.collect()


def test_nothing_is_read_any_more_for_one_whose_waiting_was_interrupted(
    connection, broker, interrupted_by
):
    shared = SharedReadsBroker(connection, queue=broker.keys.queue)
    handle = Client(shared).submit("x")
    waits, main = shared._reader._waits, threading.get_ident()

    def interrupt():
        while not waits:
            time.sleep(0.001)
        signal.pthread_kill(main, interrupted_by)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        shared.read_output({handle.request_id: 0}, block_seconds=30)
    helper.join()
    assert not waits


def test_what_an_interrupted_call_left_unread_is_no_answer_to_the_next(real_broker, monkeypatch):
    client = Client(real_broker)
    ids = [handle.request_id for handle in client.submit_many([{"prompt": "x"}] * 3)]
    client.cancel(ids[2])
    parse, answers = redis.client.Pipeline.parse_response, []

    def parse_some(pipeline, connection, name, **options):
        if len(answers) == 1:
            raise KeyboardInterrupt
        answers.append(parse(pipeline, connection, name, **options))
        return answers[-1]

    with monkeypatch.context() as interrupted:
        interrupted.setattr(redis.client.Pipeline, "parse_response", parse_some)
        with pytest.raises(KeyboardInterrupt):
            real_broker.cancel_many(ids[:2])
    assert [client.status(name).state for name in reversed(ids)] == ["cancelled"] * 3
    assert real_broker.num_scheduled() == 0


@pytest.mark.parametrize(
    "url", ["redis://h", "rediss://h", "unix:///s", "redis+sentinel://h/service"]
)
@pytest.mark.parametrize("make", [connect, connect_async])
def test_no_pool_keeps_a_connection_with_something_left_to_read(url, make):
    # A pool that asks for notifications does.
    assert not make(url).connection_pool.maint_notifications_enabled()


def test_a_thread_that_cannot_be_started_is_started_by_the_next_who_waits(
    connection, broker, monkeypatch
):
    shared = SharedReadsBroker(connection, queue=broker.keys.queue)
    handle = Client(shared).submit("x")
    with monkeypatch.context() as full:
        full.setattr("quire.client.reader.threading.Thread.start", raising_no_more_threads)
        with pytest.raises(RuntimeError, match="can't start"):
            shared.read_output({handle.request_id: 0}, block_seconds=30)
    broker.commit([make_item(claim_next(broker).claim, 0, 1, final=True)])
    (read,) = shared.read_output({handle.request_id: 0}, block_seconds=5).values()
    assert read.completion is not None


@pytest.mark.real_redis
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_of_fork_reads_though_its_parent_was_reading(real_connection, real_broker):
    shared = SharedReadsBroker(real_connection, queue=real_broker.keys.queue)
    handle = Client(shared).submit("x")
    claim, found = claim_next(real_broker).claim, []
    parent = threading.Thread(target=lambda: found.append(handle.result(timeout=30).text))
    parent.start()
    while not shared._reader._is_blocked:
        time.sleep(0.001)
    # As if all turns were taken at this moment.
    shared._turns = threading.BoundedSemaphore(1)
    shared._turns.acquire()
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        # A child that waits for ever dies of this, and has told nothing.
        signal.alarm(30)
        try:
            os.write(tells, handle.result(timeout=20).text.encode())
        except QuireError as error:
            os.write(tells, repr(error).encode())
        finally:
            os._exit(0)
    os.close(tells)
    shared._turns.release()
    real_broker.commit([make_item(claim, 0, 1, final=True)])
    with os.fdopen(told, "rb") as pipe:
        assert pipe.read() == text_of(0).encode()
    os.waitpid(child, 0)
    parent.join()
    assert found == [text_of(0)]


def raising_mistake(*_):
    raise Mistake


def raising_no_more_threads(*_):
    raise RuntimeError("can't start new thread")
