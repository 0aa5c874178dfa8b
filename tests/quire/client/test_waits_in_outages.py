"""A wait outlasts a Redis that restarts or freezes, for as long as its own timeout says."""

import asyncio
import os
import signal
import time
from contextlib import aclosing

import pytest
import redis

from quire.client.client import Client
from quire.client.client_async import AsyncClient
from quire.client.reader import SharedReadsBroker
from quire.errors import BrokerUnavailable, QuireError, WaitTimeout
from quire.queue.broker import Broker
from quire.transport import patience as patience_module
from quire.transport.connection import connect
from quire.transport.patience import Patience
from tests.quire.batch_folder import Folder, ask
from tests.quire.builders import claim_next, make_item, make_request, token_at
from tests.quire.waiting import PATIENCE_SECONDS, Reading, blocked, eventually

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(120)]

#: Of the waits: so short that every outage of a test is longer than a call is repeated.
RETRY_SECONDS = 0.1
TIMEOUT = PATIENCE_SECONDS
LONG_OUTAGE_SECONDS = 1200.0
TOKENS = (token_at(0), token_at(1))


@pytest.fixture
def server(start_server):
    with start_server(append_only=True) as server:
        yield server


def broker_at(server):
    """The other side, whose calls are repeated for as long as a busy machine needs."""
    return Broker(connect(server.url), queue="outages", retry_seconds=PATIENCE_SECONDS)


def joined(chunks):
    return tuple(token for chunk in chunks for token in chunk.token_ids)


def in_threads(make):
    def client(server):
        return Client(make(connect(server.url), queue="outages", retry_seconds=RETRY_SECONDS))

    return client


ALONE, SHARED = in_threads(Broker), in_threads(SharedReadsBroker)

WAITS = {
    "result": (ALONE, lambda quire: quire.result("g~r", timeout=TIMEOUT).token_ids),
    "stream": (ALONE, lambda quire: joined(quire.stream("g~r"))),
    "result of many threads": (
        SHARED, lambda quire: quire.result("g~r", timeout=TIMEOUT).token_ids
    ),
    "stream of many threads": (SHARED, lambda quire: joined(quire.stream("g~r"))),
    "results of a group": (
        ALONE,
        lambda quire: joined(quire.attach_group("g").results(timeout=TIMEOUT)),
    ),
    "wait of a group": (
        ALONE, lambda quire: TOKENS if quire.attach_group("g").wait(timeout=TIMEOUT) else (),
    ),
}  # fmt: skip


async def result(quire):
    return (await quire.attach("g~r").result(timeout=TIMEOUT)).token_ids


async def stream(quire):
    return joined([chunk async for chunk in quire.attach("g~r").stream()])


async def group_results(quire):
    found = quire.attach_group("g").results(timeout=TIMEOUT)
    return joined([completion async for completion in found])


async def group_wait(quire):
    return TOKENS if await quire.attach_group("g").wait(timeout=TIMEOUT) else ()


def in_a_loop(server, read, **settings):
    async def run():
        settings_ = {"queue": "outages", "retry_seconds": RETRY_SECONDS, **settings}
        async with AsyncClient(server.url, **settings_) as quire:
            return await read(quire)

    return asyncio.run(run())


def reading(server, wait):
    """A wait of this kind, in a thread."""
    if wait in WAITS:
        make, read = WAITS[wait]
        return Reading(lambda: read(make(server)))
    return Reading(lambda: in_a_loop(server, wait))


@pytest.fixture
def borne(monkeypatch):
    """How often a wait has met an outage and gone on."""
    times = []
    plain = Patience.bear

    def bear(self, error):
        pause = plain(self, error)
        times.append(time.monotonic())
        return pause

    monkeypatch.setattr(Patience, "bear", bear)
    return times


def wait_until_read(server):
    """Until somebody waits for news of the log or of the group.

    A read that does not wait may still be without its answer, and a wait that never had one ends.
    """
    with connect(server.url) as connection:
        eventually(lambda: bool(blocked(connection)))


@pytest.mark.parametrize("wait", [*WAITS, result, stream, group_results, group_wait])
def test_a_wait_outlasts_a_restart(server, borne, wait):
    broker = broker_at(server)
    broker.ensure_groups()
    broker.submit(make_request(id="g~r"))
    found = reading(server, wait)
    wait_until_read(server)
    server.kill()
    eventually(lambda: len(borne) > 1)
    server.restart()
    broker.commit([make_item(claim_next(broker).claim, 0, 2, final=True)])
    assert found.result() == TOKENS


def test_a_batch_of_a_client_outlasts_a_restart(server, borne, tmp_path):
    folder = Folder(tmp_path)
    folder.write(ask("a"))
    found = Reading(lambda: folder.run(ALONE(server)))
    wait_until_read(server)
    server.kill()
    eventually(lambda: len(borne) > 1)
    server.restart()
    broker = broker_at(server)
    broker.commit([make_item(claim_next(broker).claim, 0, 2, final=True)])
    assert found.result().completed == 1


@pytest.mark.parametrize("wait", ["result", group_results])
def test_a_wait_outlasts_a_server_that_is_frozen(server, borne, wait, monkeypatch):
    broker = broker_at(server)
    monkeypatch.setattr("quire.transport.connection.SOCKET_MARGIN_SECONDS", 1.0)
    monkeypatch.setattr("quire.transport.connection.CONNECT_SECONDS", 1.0)
    broker.ensure_groups()
    broker.submit(make_request(id="g~r"))
    found = reading(server, wait)
    wait_until_read(server)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        eventually(lambda: len(borne) > 0)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    broker.commit([make_item(claim_next(broker).claim, 0, 2, final=True)])
    assert found.result() == TOKENS


@pytest.mark.parametrize("wait", [
    "result", "result of many threads", "wait of a group", result, group_wait,
])  # fmt: skip
def test_its_own_timeout_ends_it_and_says_that_redis_is_away(server, borne, clock, wait):
    broker_at(server).submit(make_request(id="g~r"))
    found = reading(server, wait)
    wait_until_read(server)
    server.kill()
    eventually(lambda: len(borne) > 1)
    assert not found.is_over
    clock.ahead = TIMEOUT
    error = found.result()
    assert type(error) is WaitTimeout
    assert "has not ended yet, and Redis does not answer: " in str(error)
    assert isinstance(error.__cause__, BrokerUnavailable)


@pytest.fixture
def enduring(server):
    """A client that bears longer outages than any test lasts."""
    broker = Broker(connect(server.url), queue="outages", retry_seconds=RETRY_SECONDS)
    assert broker.outage_seconds == patience_module.OUTAGE_RETRIES * RETRY_SECONDS
    broker.outage_seconds = LONG_OUTAGE_SECONDS
    return Client(broker)


def test_without_a_timeout_it_bears_an_outage_for_a_named_time(server, enduring, borne, clock):
    enduring.submit("x", request_id="r")
    found = Reading(lambda: joined(enduring.stream("r")))
    wait_until_read(server)
    server.kill()
    eventually(lambda: len(borne) > 1)
    clock.ahead = LONG_OUTAGE_SECONDS / 2
    before = len(borne)
    eventually(lambda: len(borne) > before + 1)
    assert not found.is_over
    clock.ahead = LONG_OUTAGE_SECONDS
    assert isinstance(found.result(), BrokerUnavailable)


def test_a_redis_that_never_answered_is_told_at_once(server, borne):
    quire = ALONE(server)
    server.kill()
    with pytest.raises(BrokerUnavailable):
        next(quire.stream("g~r"))
    assert not borne


def test_what_writes_is_repeated_no_longer_than_before(server, enduring, borne):
    handle = enduring.submit("x", request_id="r")
    server.kill()
    for write in (handle.cancel, lambda: enduring.submit("y"), handle.status):
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable):
            write()
        assert time.monotonic() - began < PATIENCE_SECONDS / 2
    assert not borne


def test_an_error_that_will_not_pass_ends_a_wait_at_once(borne):
    patience = Patience(TIMEOUT, "r", has_answered=True)
    refused = BrokerUnavailable("no such permission")
    refused.__cause__ = redis.exceptions.NoPermissionError("no")
    for error in (refused, BrokerUnavailable("the client was closed")):
        with pytest.raises(BrokerUnavailable) as caught:
            patience.bear(error)
        assert caught.value is error
    assert not borne


def test_a_client_that_is_closed_during_an_outage_ends_its_waits(server, borne):
    async def scenario():
        async with AsyncClient(server.url, queue="outages", retry_seconds=RETRY_SECONDS) as quire:
            handle = await quire.submit("x")
            waiting = asyncio.create_task(handle.result(timeout=TIMEOUT))
            await asyncio.to_thread(wait_until_read, server)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(eventually, lambda: len(borne) > 0)
        waiting.cancel()
        (end,) = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(end, QuireError | asyncio.CancelledError)

    asyncio.run(scenario())


def test_a_reader_that_stops_leaves_nothing_behind(server):
    async def scenario():
        async with AsyncClient(server.url, queue="outages") as quire:
            handle = await quire.submit("x")
            async with aclosing(handle.stream()) as chunks:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(chunks), 0.2)

    asyncio.run(scenario())
