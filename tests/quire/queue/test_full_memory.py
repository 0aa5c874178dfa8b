"""A Redis without memory is a full queue to its callers, and no reason to stop reading."""

import asyncio
import threading

import pytest

from quire import AsyncClient, Broker, Client, QueueFull, State, connect
from quire.queue.claim.claim import NotClaimed, NotClaimedReason
from quire.queue.scripts import load_source
from quire.testing.in_memory import FakeWorker
from tests.quire.builders import claim_next, make_item, make_request, text_of

#: What a Redis without memory answers to a script.
OUT_OF_MEMORY = "OOM command not allowed when used memory > 'maxmemory'."


@pytest.fixture
def server(start_server):
    with start_server() as started:
        yield started


@pytest.fixture
def admin(server):
    with connect(server.url) as connection:
        yield connection


@pytest.mark.real_redis
def test_a_submit_without_memory_is_a_full_queue_until_there_is_some_again(server, admin):
    with Client(server.url) as client:
        admin.config_set("maxmemory", 1)
        with pytest.raises(QueueFull) as caught:
            client.submit("x", request_id="a")
        assert (caught.value.limit, caught.value.accepted) == ("memory", ())
        admin.config_set("maxmemory", 0)
        assert client.submit("x", request_id="a").status().state is State.QUEUED


@pytest.mark.real_redis
def test_a_submit_of_a_loop_is_told_the_same(server, admin):
    async def submit():
        async with AsyncClient(server.url) as client:
            await client.submit("x")

    admin.config_set("maxmemory", 1)
    with pytest.raises(QueueFull) as caught:
        asyncio.run(submit())
    assert caught.value.limit == "memory"


@pytest.mark.real_redis
def test_what_is_published_can_be_read_without_memory(server, admin):
    broker = Broker(admin)
    broker.ensure_groups()
    with Client(server.url) as client:
        handle = client.submit("x")
        broker.commit([make_item(claim_next(broker).claim, 0, 2, final=True)])
        admin.config_set("maxmemory", 1)
        assert handle.result(timeout=30).text == text_of(0) + text_of(1)


@pytest.mark.real_redis
def test_a_claim_that_is_refused_costs_those_beside_it_nothing(admin):
    """They are running already, and nobody else would know of them until their lease is over."""
    one_is_full = (
        f"if ARGV[10] == 'b' then return redis.error_reply([[{OUT_OF_MEMORY}]]) end\n"
        + load_source("claim")
    )
    broker = Broker(admin, sources={"claim": one_is_full})
    broker.ensure_groups()
    broker.submit_many([make_request(id=name) for name in "abc"])
    answers = broker.claim(broker.peek(count=3, block_seconds=0))
    assert answers[1] == NotClaimed("b", NotClaimedReason.REFUSED)
    (left,) = broker.peek(count=9)
    assert left.request_id == "b"
    assert broker.status("b").state is State.QUEUED
    held = [answers[0].claim, answers[2].claim]
    assert [reply.alive for reply in broker.heartbeat(held)] == [True, True]


@pytest.mark.real_redis
def test_claims_of_which_none_is_let_in_raise_and_can_be_made_again(admin):
    broker = Broker(admin)
    broker.ensure_groups()
    broker.submit_many([make_request(id=name) for name in "ab"])
    entries = broker.peek(count=2, block_seconds=0)
    admin.config_set("maxmemory", 1)
    with pytest.raises(QueueFull):
        broker.claim(entries)
    admin.config_set("maxmemory", 0)
    again = broker.claim(broker.peek(count=9))
    assert [claimed.attempts for claimed in again] == [1, 1]


@pytest.mark.real_redis
def test_a_fake_worker_waits_for_memory(server, admin):
    broker, refused = Broker(admin), threading.Event()
    claim = broker.claim

    def noticed(candidates):
        try:
            return claim(candidates)
        except QueueFull:
            refused.set()
            raise

    broker.claim = noticed
    with Client(server.url) as client:
        handle = client.submit("x")
        admin.config_set("maxmemory", 1)
        with FakeWorker(broker, lambda _: "an answer"):
            assert refused.wait(30)
            admin.config_set("maxmemory", 0)
            assert handle.result(timeout=30).text == "an answer"
