"""Pictures of requests: stored once, for as long as a request that names them may wait."""

import asyncio

import pytest

from quire import AsyncClient, Client
from quire.errors import InvalidRequest, QueueFull, UnknownRequest
from quire.queue.control.limits import QueueLimits
from quire.queue.request.arguments import MAX_ITEMS_PER_CALL
from quire.queue.submit.pictures import WAIT_MS
from quire.queue.submit.routing import shard_of
from quire.wire.message import Message
from quire.wire.output import State
from quire.wire.pictures import MAX_PICTURES, part_of
from quire.wire.sizes import (
    PICTURE_BYTES_PER_TOKEN,
    TOKENS_PER_PICTURE,
    estimated_tokens,
    rate_tokens_of,
)
from tests.quire.builders import make_request
from tests.quire.clusters import Cluster
from tests.quire.loop_face import async_twin
from tests.quire.picture_files import png, sha256

RED, BLUE = png(color=b"\xff\0\0"), png(color=b"\0\0\xff")


def chat(*pictures, **options):
    parts = [{"type": "image", "image": data} for data in pictures]
    return {"messages": [{"role": "user", "content": parts}], **options}


def naming(*digests, **options):
    """A request that names pictures and brings none."""
    parts = [part_of(digest) for digest in digests]
    body = {"messages": [{"role": "user", "content": parts}]}
    return make_request(kind="chat.completions", body=body, **options)


@pytest.fixture
def client(broker):
    return Client(broker)


@pytest.fixture
def life(broker, connection):
    """How long a picture lives, in ms; -2 if it is not stored."""
    return lambda data: connection.pttl(broker.keys.picture(sha256(data)))


def test_a_picture_is_beside_its_request_and_not_in_it(client, broker, connection):
    client.submit(**chat(RED), request_id="a")
    assert broker.pictures([sha256(RED), sha256(BLUE)]) == {sha256(RED): RED}
    assert RED not in connection.get(broker.keys.body("a"))
    (claimed,) = broker.claim(broker.peek(count=1))
    assert sha256(RED).encode() in claimed.request_bytes


def test_the_same_picture_is_stored_and_sent_once(client, connection, broker, monkeypatch):
    client.submit(**chat(RED, RED))
    sent = []
    send = connection.set
    monkeypatch.setattr(connection, "set", lambda *a, **k: sent.append(a) or send(*a, **k))
    client.submit(**chat(RED), tenant="another")
    client.submit_choices(**chat(RED), n=3)
    assert sent == []
    client.submit(**chat(RED, BLUE))
    assert [key for key, _ in sent] == [broker.keys.picture(sha256(BLUE))]


def test_it_lives_as_long_as_the_longest_request_that_names_it(client, life):
    client.submit(**chat(RED), deadline=100)
    short = life(RED)
    assert 3_600_000 < short <= 3_700_000
    client.submit(**chat(RED), delay_seconds=50_000)
    longest = life(RED)
    assert longest > 86_400_000 + 50_000_000
    client.submit(**chat(RED), deadline=100)
    assert life(RED) > longest - 60_000


def test_a_retry_is_harmless_and_one_after_its_expiry_stores_it_again(
    client, broker, connection, life
):
    for _ in range(2):
        client.submit(**chat(RED), request_id="a")
    assert sum(broker.queue_depth().values()) == 1
    connection.delete(broker.keys.picture(sha256(RED)))
    client.submit(**chat(RED), request_id="b")
    assert life(RED) > WAIT_MS


def test_a_full_queue_takes_no_picture(client, broker, life):
    broker.set_limits(QueueLimits(requests=1))
    client.submit("x")
    with pytest.raises(QueueFull):
        client.submit(**chat(RED))
    assert life(RED) == -2


def test_a_picture_that_nobody_sends_is_refused_by_its_part(client, broker, life):
    client.submit(**chat(RED))
    with pytest.raises(InvalidRequest) as refused:
        client.submit(messages=naming(sha256(RED), sha256(BLUE)).body["messages"])
    assert refused.value.field == "body.messages.0.content.1"
    assert sum(broker.queue_depth().values()) == 1


def test_a_request_may_name_what_is_stored_and_lets_it_live(client, broker, connection, life):
    client.submit(**chat(RED))
    connection.pexpire(broker.keys.picture(sha256(RED)), 60_000)
    broker.submit(naming(sha256(RED)))
    assert life(RED) > WAIT_MS


def test_an_unchecked_request_declares_no_more_keys_than_one_may_have(broker):
    digests = [f"{number:064x}" for number in range(MAX_PICTURES + 1)]
    with pytest.raises(InvalidRequest):
        broker.submit(naming(*digests))
    too_many = naming(*digests)
    with pytest.raises(InvalidRequest) as refused:
        too_many.parse_body()
    assert refused.value.field == f"body.messages.0.content.{MAX_PICTURES}"


def test_turns_stay_in_their_order_while_pictures_are_stored(client, broker):
    turns = [chat(RED, session_id="s", request_id="a"), {"prompt": "x", "session_id": "s"}]
    client.submit_many([*turns, chat(BLUE, request_id="c")])
    (first, second) = broker.peek(count=4)
    assert {first.request_id, second.request_id} == {"a", "c"}


def test_an_idempotency_key_and_pictures_go_together(client, life):
    first = client.submit(**chat(RED), idempotency_key="k")
    again = client.submit(**chat(RED), idempotency_key="k")
    assert again.request_id == first.request_id
    other = client.submit(**chat(BLUE), idempotency_key="k", request_id="z")
    assert other.request_id == first.request_id


def test_pictures_are_part_of_what_a_request_asks(client):
    digests = {Message.of(naming(sha256(data), id="a")).digest for data in (RED, BLUE)}
    assert len(digests) == 2


def test_a_picture_counts_as_tokens_and_by_its_bytes():
    request = naming(sha256(RED), sha256(BLUE))
    assert estimated_tokens(request) >= 2 * TOKENS_PER_PICTURE
    sizes = [1, PICTURE_BYTES_PER_TOKEN, PICTURE_BYTES_PER_TOKEN + 1]
    assert [rate_tokens_of([bytes(size)]) for size in sizes] == [1, 1, 2]
    assert rate_tokens_of(map(bytes, sizes)) == 4


def test_the_rate_of_a_tenant_bounds_the_bytes_of_pictures_that_it_leaves(client, broker, life):
    broker.set_limits(QueueLimits(rate=4000))
    large = [color + bytes(3_000_000) for color in (RED, BLUE)]
    first = client.submit(**chat(large[0]), sampling={"max_tokens": 1})
    first.cancel()
    with pytest.raises(QueueFull) as refused:
        client.submit(**chat(large[1]), sampling={"max_tokens": 1})
    assert (refused.value.limit, life(large[1])) == ("rate", -2)


def test_an_event_loop_stores_them_too(connection, broker, life):
    async def scenario():
        async with AsyncClient(async_twin(connection), queue=broker.keys.queue) as client:
            await client.submit(**chat(RED))

    asyncio.run(scenario())
    assert life(RED) > WAIT_MS


def test_a_worker_holds_the_pictures_of_its_claims(client, broker, connection, life):
    client.submit(**chat(RED, BLUE), deadline=100)
    assert life(RED) < 3_700_001
    connection.delete(broker.keys.picture(sha256(BLUE)))
    digests = [sha256(RED), sha256(BLUE), sha256(RED)]
    assert broker.hold_pictures(digests) == {sha256(RED): RED}
    assert life(RED) > 86_400_000
    assert broker.hold_pictures([]) == {}


def test_a_worker_keeps_the_pictures_of_what_it_runs(client, broker, life):
    client.submit(**chat(RED, BLUE), deadline=100)
    assert life(RED) < 3_700_001
    many = [f"{number:064x}" for number in range(MAX_ITEMS_PER_CALL)]
    broker.keep_pictures([sha256(RED), *many, sha256(BLUE)])
    assert min(life(RED), life(BLUE)) > 86_400_000
    broker.keep_pictures([])


def test_a_dead_letter_is_requeued_only_with_all_its_pictures(client, broker, connection, life):
    client.submit(**chat(RED, BLUE), request_id="a")
    (claimed,) = broker.claim(broker.peek(count=1))
    broker.dead_letter(claimed.claim, "tired")
    (letter,) = broker.dead_letters()
    connection.delete(broker.keys.picture(sha256(BLUE)))
    with pytest.raises(UnknownRequest, match="a picture of the request has expired"):
        broker.requeue(letter, keep_tokens=True)
    assert (broker.status("a").state, broker.dead_letters()) == (State.FAILED, [letter])
    client.submit(**chat(BLUE), deadline=100)
    connection.pexpire(broker.keys.picture(sha256(RED)), 60_000)
    assert broker.requeue(letter, keep_tokens=True) is State.QUEUED
    assert min(life(RED), life(BLUE)) > 86_400_000


def test_bytes_with_another_digest_count_as_absent_and_make_room(client, broker, connection, life):
    for read in (broker.pictures, broker.hold_pictures):
        client.submit(**chat(RED, BLUE))
        connection.set(broker.keys.picture(sha256(RED)), BLUE, keepttl=True)
        assert read([sha256(RED), sha256(BLUE)]) == {sha256(BLUE): BLUE}
        assert life(RED) == -2
        client.submit(**chat(RED))
        assert read([sha256(RED)]) == {sha256(RED): RED}


def test_to_hold_a_picture_never_shortens_its_life(client, broker, life):
    client.submit(**chat(RED), delay_seconds=50_000)
    longest = life(RED)
    broker.hold_pictures([sha256(RED)])
    assert life(RED) > longest - 60_000


@pytest.mark.real_redis
def test_each_shard_of_a_cluster_has_the_pictures_of_its_requests(cluster: Cluster):
    queue = "test-pictures"
    ids = [f"r{number}" for number in range(8)]
    with Client(cluster.url, queue=queue, shards=2) as client:
        client.submit_many([chat(RED, request_id=name) for name in ids])
        client.submit_many([chat(RED, BLUE, request_id=f"{name}b") for name in ids])
        assert {shard_of(name, 2) for name in ids} == {0, 1}
        for broker in client.brokers:
            found = broker.pictures([sha256(RED), sha256(BLUE)])
            assert found == {sha256(RED): RED, sha256(BLUE): BLUE}
