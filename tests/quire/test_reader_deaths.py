"""A reader that dies of a mistake of ours leaves nobody waiting, and another takes its place."""

import asyncio
import gc
import signal
import threading
import time

import pytest

from quire import BrokerUnavailable, Client
from quire.aio import AsyncClient
from quire.reader import SharedReadsBroker
from tests.quire.builders import claim_next, make_item, text_of
from tests.quire.loop_face import async_twin


class Mistake(Exception):
    """What no reader expects."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_fails_those_who_wait_and_is_replaced(connection, broker, monkeypatch):
    shared = SharedReadsBroker(connection, queue=broker.keys.queue)
    handle = Client(shared).submit("x")
    claim = claim_next(broker).claim
    with monkeypatch.context() as broken:
        broken.setattr("quire.reader._Reader._read_once", raising_mistake)
        with pytest.raises(BrokerUnavailable, match="has ended"):
            shared.read_output({handle.request_id: 0}, block_seconds=30)
    broker.commit([make_item(claim, 0, 1, final=True)])
    assert handle.result(timeout=30).text == text_of(0)


def test_a_task_that_dies_fails_those_who_wait_and_is_replaced(connection, broker, monkeypatch):
    async def scenario():
        client = AsyncClient(async_twin(connection), queue=broker.keys.queue)
        handle = await client.submit("x")
        claim = claim_next(broker).claim
        mine = client._brokers[0]
        with monkeypatch.context() as broken:
            broken.setattr("quire.async_reader.AsyncReader._read_once", raising_mistake)
            with pytest.raises(BrokerUnavailable, match="has ended"):
                await mine.read_output({handle.request_id: 0}, block_seconds=30)
        broker.commit([make_item(claim, 0, 1, final=True)])
        completion = await handle.result(timeout=30)
        await client.close()
        return completion.text

    assert asyncio.run(scenario()) == text_of(0)
    # The dead task complains when it is collected: here, and not in the middle of another test.
    gc.collect()


@pytest.fixture
def interrupted_by():
    """SIGUSR1 interrupts the main thread as Ctrl-C would."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


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


def test_a_thread_that_cannot_be_started_is_started_by_the_next_who_waits(
    connection, broker, monkeypatch
):
    shared = SharedReadsBroker(connection, queue=broker.keys.queue)
    handle = Client(shared).submit("x")
    with monkeypatch.context() as full:
        full.setattr("quire.reader.threading.Thread.start", raising_no_more_threads)
        with pytest.raises(RuntimeError, match="can't start"):
            shared.read_output({handle.request_id: 0}, block_seconds=30)
    broker.commit([make_item(claim_next(broker).claim, 0, 1, final=True)])
    (read,) = shared.read_output({handle.request_id: 0}, block_seconds=5).values()
    assert read.completion is not None


def raising_mistake(*_):
    raise Mistake


def raising_no_more_threads(*_):
    raise RuntimeError("can't start new thread")
