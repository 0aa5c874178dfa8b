"""A reader that dies of a mistake of ours leaves nobody waiting, and another takes its place."""

import asyncio
import gc

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
            broken.setattr("quire.async_broker._Reader._read_once", raising_mistake)
            with pytest.raises(BrokerUnavailable, match="has ended"):
                await mine.read_output({handle.request_id: 0}, block_seconds=30)
        broker.commit([make_item(claim, 0, 1, final=True)])
        completion = await handle.result(timeout=30)
        await client.close()
        return completion.text

    assert asyncio.run(scenario()) == text_of(0)
    # The dead task complains when it is collected: here, and not in the middle of another test.
    gc.collect()


def raising_mistake(*_):
    raise Mistake
