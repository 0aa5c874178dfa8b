"""A Redis that goes away while calls are answered: what becomes of them, and of their requests."""

import asyncio
import contextlib
import json
import threading

import pytest
from structlog.testing import capture_logs

from quire.client.client_async import AsyncClient
from quire.errors import BrokerUnavailable, ProtocolError, QueueFull, UnknownRequest
from service.gateway import abandoned
from service.gateway.abandoned import AbandonedRequests
from service.gateway.answers import Answer
from tests.service.builders import PATIENCE_SECONDS, eventually
from tests.service.gateway.builders import openai_client, state_of, wait_until_cancelled
from tests.service.gateway.front import COMPLETIONS, KEY

AWAY = BrokerUnavailable("away")
FULL = QueueFull("Redis has no memory left", limit="memory")


@pytest.fixture
def followed(monkeypatch):
    """Set once a gateway reads the log of an answer; its call is in the queue by then."""
    followed = threading.Event()
    plain = Answer.updates

    def news(self, *, idle_seconds):
        followed.set()
        return plain(self, idle_seconds=idle_seconds)

    monkeypatch.setattr(Answer, "updates", news)
    return followed


@pytest.fixture
def lose(gateway, fake, followed):
    """Sends a call whose answer Redis leaves: the response, what it says, and the log by then.

    The outage begins when so many tokens of it are `published`.
    """

    def lose(*, published=0, **headers):
        body = {"prompt": "x", **headers.pop("body", {})}
        connection = gateway.send("POST", COMPLETIONS, body, **headers)
        assert followed.wait(PATIENCE_SECONDS)
        if published:
            eventually(lambda: fake.requests, "claimed")
            request_id = fake.requests[0].id
            eventually(
                lambda: fake.broker.status(request_id).published >= published, "published in part"
            )
        with fake.outage(), capture_logs() as said:
            response = connection.getresponse()
            text = response.read().decode()
        connection.close()
        return response, text, said

    return lose


@pytest.mark.parametrize("pieces", [["one ", None], [None]])
def test_a_whole_answer_that_redis_leaves_is_told_why_in_the_log_only_and_its_requests_end(
    lose, fake, script, pieces
):
    script.pieces = pieces
    response, text, said = lose(body={"n": 2})
    assert (response.status, "Retry-After" in response.headers) == (503, True)
    assert "broker_unavailable" in text and "Redis" not in text
    assert [(line["event"], line["reason"][:23]) for line in said] == [
        ("no answer from the queue", "Redis cannot be reached")
    ]
    # The caller is told to call again, and nobody waits for these any more.
    first = response.headers["X-Request-ID"]
    wait_until_cancelled(fake, first, f"{first}:1")


def test_a_stream_that_redis_leaves_before_a_word_ends_where_a_status_can_say_so(
    lose, fake, script, patient_status
):
    script.pieces = [None]
    response, _, _ = lose(body={"stream": True})
    assert response.status == 503
    wait_until_cancelled(fake, response.headers["X-Request-ID"])


def test_a_stream_that_has_begun_goes_on_to_be_followed_again(gateway, fake, script):
    script.pieces = ["one ", None, "two"]
    with gateway.stream() as stream:
        stream.read_tokens(4)
        with fake.outage():
            (error,) = stream.rest()
    script.release.set()
    with gateway.resume(stream.request_id, error.id) as again:
        assert [event.text for event in again.rest()] == ["two", "", ""]


def test_a_request_goes_on_whose_caller_has_a_key(lose, gateway, fake, script):
    script.pieces = ["one ", None, "two"]
    response, _, _ = lose(published=4, **KEY)
    assert response.status == 503
    script.release.set()
    assert gateway.complete(headers=KEY).text_of_choice == "one two"
    assert len(fake.requests) == 1


def test_a_call_of_which_redis_has_heard_though_its_answer_is_lost_is_ended(
    gateway, fake, script, monkeypatch
):
    script.pieces = [None]
    plain = AsyncClient.submit_many
    taken = []

    async def submit_many(self, requests):
        taken.extend(handle.request_id for handle in await plain(self, requests))
        raise BrokerUnavailable("the answer to the submit is lost")

    monkeypatch.setattr(AsyncClient, "submit_many", submit_many)
    assert gateway.complete(n=2).error["code"] == "broker_unavailable"
    assert len(taken) == 2
    wait_until_cancelled(fake, *taken)


def lose_request(fake, request_id):
    """What a failover does whose replica had not heard of the request yet."""
    keys = fake.broker.keys
    fake.connection.delete(*(keys.request(request_id), keys.body(request_id)))
    fake.connection.delete(keys.output(request_id))
    fake.connection.hdel(keys.open, request_id)
    fake.connection.hdel(keys.log_positions, request_id)


@pytest.mark.parametrize("headers", [{}, KEY])
def test_a_call_whose_request_redis_has_lost_is_told_so_and_begins_anew_when_it_is_repeated(
    gateway, fake, script, followed, headers
):
    script.pieces = ["one ", None, "two"]
    connection = gateway.send("POST", COMPLETIONS, {"prompt": "x", "n": 2}, **headers)
    assert followed.wait(PATIENCE_SECONDS)
    eventually(lambda: len(fake.requests) == 2, "claimed")
    first = min((request.id for request in fake.requests), key=len)
    lose_request(fake, first)
    response = connection.getresponse()
    assert (response.status, "Retry-After" in response.headers) == (503, True)
    assert json.loads(response.read())["error"]["code"] == "request_lost"
    connection.close()
    if not headers:
        # The caller begins anew, and nobody waits for the other choice.
        wait_until_cancelled(fake, f"{first}:1")
    script.release.set()
    again = gateway.complete(n=2, headers=headers)
    assert [choice["text"] for choice in again.body["choices"]] == ["one two"] * 2
    assert (again.request_id == first) == bool(headers)


def test_a_stream_whose_request_redis_has_lost_says_that_only_a_new_call_helps(
    gateway, fake, script
):
    script.pieces = ["one ", None]
    with gateway.stream() as stream:
        stream.read_tokens(4)
        lose_request(fake, stream.request_id)
        (error,) = stream.rest()
    assert error.body["error"]["code"] == "request_lost"
    assert "send the call again" in error.body["error"]["message"]
    assert gateway.metric("quire_gateway_streams_broken_total", reason="rewound") == 1
    # Who only comes for it later cannot be told it from one that never was.
    assert gateway.get(f"/v1/requests/{stream.request_id}").status == 404


def test_a_whole_answer_of_which_redis_lost_a_part_is_read_anew(gateway, fake, script, monkeypatch):
    """Nobody was told of what is lost."""
    script.pieces = ["one ", "two ", None, "three"]
    plain, reads = Answer.updates, []

    async def news(self, *, idle_seconds):
        reads.append(0)
        async for choice, items in plain(self, idle_seconds=idle_seconds):
            reads[-1] += sum(len(item.token_ids) for item in items)
            yield choice, items

    monkeypatch.setattr(Answer, "updates", news)
    connection = gateway.send("POST", COMPLETIONS, {"prompt": "x"})
    eventually(lambda: reads == [8], "both pieces are read")
    keys, redis, (request,) = fake.broker.keys, fake.connection, fake.requests
    log, record = keys.output(request.id), keys.request(request.id)
    (first_id, first), (last_id, last) = redis.xrange(log)
    # At once: a look between two of them finds another log, or reads this one once more.
    lost = redis.pipeline()
    lost.hdel(keys.log_positions, request.id)
    lost.hset(record, mapping={"published": 4, "prefix": first[b"prefix"]})
    lost.delete(log)
    lost.xadd(log, first, id=first_id)
    lost.execute()
    eventually(lambda: reads == [8, 4], "it is read anew")
    again = redis.pipeline().xadd(log, last, id=last_id)
    again.hset(record, mapping={"published": 8, "prefix": last[b"prefix"]}).execute()
    script.release.set()
    with contextlib.closing(connection):
        response = connection.getresponse()
        assert response.status == 200
        assert json.loads(response.read())["choices"][0]["text"] == "one two three"


def test_who_hangs_up_while_redis_is_away_ends_the_request_when_it_is_back(gateway, fake, script):
    script.pieces = ["one ", None]
    with gateway.stream() as stream:
        stream.read_tokens(4)
        with fake.outage():
            stream.hang_up()
            gateway.wait_for_hang_up("late")
    wait_until_cancelled(fake, stream.request_id)


@pytest.fixture
def memory(monkeypatch):
    """Cancellations are refused for want of memory until this is set; they are writes, too."""
    memory, plain = threading.Event(), AsyncClient.cancel

    async def cancel(self, request_id):
        if not memory.is_set():
            raise FULL
        return await plain(self, request_id)

    monkeypatch.setattr(AsyncClient, "cancel", cancel)
    return memory


def test_who_hangs_up_while_redis_has_no_memory_ends_the_request_when_it_has(
    memory, gateway, script, fake
):
    script.pieces = ["one ", None]
    with gateway.stream() as stream:
        stream.read_tokens(4)
    gateway.wait_for_hang_up("late")
    memory.set()
    wait_until_cancelled(fake, stream.request_id)


def test_what_a_full_redis_took_in_of_a_refused_call_is_ended_when_it_has_memory_again(
    memory, gateway, script, fake, monkeypatch
):
    script.pieces = [None]
    plain, taken = AsyncClient.submit_many, []

    async def submit_many(self, requests):
        taken.extend(handle.request_id for handle in await plain(self, requests[:1]))
        raise QueueFull("Redis has no memory left", limit="memory", accepted=tuple(taken))

    monkeypatch.setattr(AsyncClient, "submit_many", submit_many)
    assert gateway.complete(n=2).error["code"] == "queue_full"
    memory.set()
    wait_until_cancelled(fake, *taken)


def test_a_choice_that_cannot_be_ended_keeps_none_of_the_others_from_it(
    gateway, script, fake, monkeypatch
):
    """As one whose keys are damaged."""
    script.pieces = ["one ", None]
    plain = AsyncClient.cancel

    async def cancel(self, request_id):
        if request_id == stream.request_id:
            raise ProtocolError("a transition failed, and would fail again")
        return await plain(self, request_id)

    monkeypatch.setattr(AsyncClient, "cancel", cancel)
    with gateway.stream(n=2) as stream:
        stream.read_tokens(4)
    wait_until_cancelled(fake, f"{stream.request_id}:1")
    gateway.wait_for_hang_up("cancelled")


def test_a_gateway_that_ends_first_says_how_many_requests_go_on_for_nobody(
    start, fake, script, monkeypatch
):
    async def cancel(self, request_id):
        raise BrokerUnavailable("away, but for the worker")

    monkeypatch.setattr(AsyncClient, "cancel", cancel)
    gateway = start()
    script.pieces = ["one ", None, "two"]
    with gateway.stream(n=2) as stream:
        stream.read_tokens(4)
    gateway.wait_for_hang_up("late")
    script.release.set()
    for request_id in (stream.request_id, f"{stream.request_id}:1"):
        eventually(lambda id_=request_id: state_of(fake, id_) == "completed", "completed")
    with capture_logs() as said:
        gateway.stop()
        gateway.join()
    told = [line for line in said if line["event"] == "requests run on that nobody waits for"]
    assert [line["requests"] for line in told] == [2]


def test_of_a_call_that_openais_client_repeats_by_itself_one_generation_is_left(
    gateway, fake, script, followed
):
    script.pieces = ["one ", None, "two"]
    answers = []

    def ask():
        with openai_client(gateway.url, max_retries=5) as client:
            answers.append(client.completions.create(model="fake", prompt="x"))

    asking = threading.Thread(target=ask)
    asking.start()
    assert followed.wait(PATIENCE_SECONDS)
    eventually(lambda: fake.requests, "the request runs")
    told = {"route": "completions", "status": "503"}
    with fake.outage():
        eventually(
            lambda: gateway.metric("quire_gateway_responses_total", **told) >= 1, "it is refused"
        )
    eventually(lambda: len({request.id for request in fake.requests}) == 2, "it is repeated")
    # After a long outage the first one was claimed twice.
    first, again = dict.fromkeys(request.id for request in fake.requests)
    wait_until_cancelled(fake, first)
    script.release.set()
    asking.join(PATIENCE_SECONDS)
    assert answers[0].id == again
    assert state_of(fake, again) == "completed"


class Redis:
    """What is cancelled, and how often it was tried while Redis was away."""

    def __init__(self, error=AWAY):
        self.error = error
        self.is_away = True
        self.num_tries = 0
        self.cancelled = []

    async def cancel(self, request_id):
        self.num_tries += 1
        if self.is_away:
            raise self.error
        self.cancelled.append(request_id)
        if request_id == "unknown":
            raise UnknownRequest(request_id)


@pytest.mark.parametrize("error", [AWAY, FULL])
def test_what_is_abandoned_is_ended_in_its_order_once_redis_is_back(monkeypatch, error):
    monkeypatch.setattr(abandoned, "RETRY_SECONDS", 0.0)

    async def live():
        redis = Redis(error)
        kept = AbandonedRequests(redis.cancel)
        kept.add(["a", "unknown"])
        while redis.num_tries < 3:
            await asyncio.sleep(0)
        kept.add(["b"])
        redis.is_away = False
        while len(redis.cancelled) < 3:
            await asyncio.sleep(0)
        kept.add(["c"])
        while len(redis.cancelled) < 4:
            await asyncio.sleep(0)
        with capture_logs() as said:
            await kept.close()
        assert (redis.cancelled, said) == (["a", "unknown", "b", "c"], [])

    asyncio.run(live())


def test_of_more_than_are_kept_the_oldest_go_on_and_an_end_says_how_many_are_left(monkeypatch):
    monkeypatch.setattr(abandoned, "MAX_ABANDONED", 3)

    async def live():
        redis = Redis()
        kept = AbandonedRequests(redis.cancel)
        kept.add("abcde")
        while not redis.num_tries:
            await asyncio.sleep(0)
        with capture_logs() as said:
            await kept.close()
        assert [(line["log_level"], line["requests"]) for line in said] == [("warning", 3)]
        assert list(kept._ids) == ["c", "d", "e"]

    asyncio.run(live())
