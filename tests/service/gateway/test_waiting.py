"""Callers whose answer does not come yet: Redis restarts, or no worker is there."""

import pytest

from quire.client.client_async import AsyncClient
from quire.queue.broker import Broker
from quire.testing.in_memory import FakeQuire
from quire.transport.connection import connect
from quire.transport.patience import Patience
from service.gateway import streaming as streams
from tests.quire.builders import claim_next, make_item
from tests.quire.waiting import Reading
from tests.service.builders import eventually, private_redis
from tests.service.gateway.builders import GatewayThread
from tests.service.gateway.front import COMPLETIONS


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(streams, "FIRST_EVENT_SECONDS", 0.05)
    monkeypatch.setattr(streams, "COMMENT_SECONDS", 0.1)


@pytest.mark.real_redis
@pytest.mark.timeout(120)
def test_streams_and_whole_answers_outlast_a_restart_of_redis(monkeypatch, quick):
    answered, borne = set(), set()

    def note(method, waits):
        plain = getattr(Patience, method)
        monkeypatch.setattr(
            Patience, method, lambda self, *error: waits.add(self) or plain(self, *error)
        )

    note("answered", answered)
    note("bear", borne)
    with private_redis() as server:
        broker = Broker(connect(server.url))
        broker.ensure_groups()

        def client():
            # Half a minute of patience, in which a busy machine starts a Redis.
            return AsyncClient(server.url, retry_seconds=1.0)

        with GatewayThread(client) as gateway, gateway.stream() as stream:
            whole = Reading(gateway.complete)
            # A request in the queue is not enough: until the gateway has read the reply of Redis,
            # a call ends with 503 after its short time of retries.
            eventually(lambda: len(answered) == 2, "both answers have been looked for once")
            server.kill()
            eventually(lambda: len(borne) == 2, "both have met the outage and waited on")
            server.restart()
            for _ in range(2):
                broker.commit([make_item(claim_next(broker).claim, 0, 2, final=True)])
            *_, end, done = stream.rest()
            assert (end.choice["finish_reason"], done.data) == ("length", "[DONE]")
            assert whole.result().status == 200


def first_comment(gateway):
    """The first line of a stream that has nothing else to say yet."""
    connection = gateway.send("POST", COMPLETIONS, {"prompt": "x", "stream": True})
    try:
        return connection.getresponse().readline()
    finally:
        connection.close()


def test_a_caller_of_a_queue_without_a_worker_is_told_so_in_its_stream(quick):
    told = b": no worker of this queue is alive; the request waits for one\n"
    with FakeQuire() as fake, GatewayThread(fake.async_client) as gateway:
        assert first_comment(gateway) == told
        fake.broker.beat_worker("w", "stopped", {}, model="fake")
        assert first_comment(gateway) == told


def test_a_caller_of_a_queue_whose_workers_load_is_told_so_in_its_stream(quick):
    told = b": the workers of this queue still load their model; the request waits for one\n"
    with FakeQuire() as fake, GatewayThread(fake.async_client) as gateway:
        fake.broker.beat_worker("w", "loading", {}, model="fake")
        fake.broker.beat_worker("gone", "stopped", {}, model="fake")
        assert first_comment(gateway) == told


def test_a_caller_of_a_queue_with_a_worker_is_told_that_its_answer_goes_on(quick):
    with FakeQuire() as fake, GatewayThread(fake.async_client) as gateway:
        fake.broker.beat_worker("w", "ready", {}, model="fake")
        fake.broker.beat_worker("late", "loading", {}, model="fake")
        assert first_comment(gateway) == b": the answer goes on\n"
