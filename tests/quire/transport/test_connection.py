"""Connections and retries: nothing is repeated behind our back, and a dead server is not hidden."""

import asyncio
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import fakeredis
import pytest
import redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    InvalidResponse,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from quire import Client
from quire.client.client_async import AsyncClient
from quire.errors import BrokerUnavailable, WaitTimeout
from quire.queue.broker import Broker
from quire.queue.publish.commit import CommitStatus
from quire.queue.scripts import load_source
from quire.transport.connection import MAX_BLOCK_SECONDS, connect, translated
from quire.transport.connection_async import connect_async
from quire.transport.retrying import Retrying
from quire.wire.output import State
from tests.quire.builders import claim_next, make_item, make_request, submit_and_claim
from tests.quire.proxy import wire_to

pytestmark = pytest.mark.timeout(60)


def failing(errors):
    """An operation that raises each of the errors and then returns how often it was called."""
    calls = []

    def operation():
        calls.append(1)
        if len(calls) <= len(errors):
            raise errors[len(calls) - 1]
        return len(calls)

    return operation


def test_a_connection_never_retries_by_itself_and_outlives_a_blocking_read():
    settings = connect("redis://127.0.0.1:1/0").connection_pool.connection_kwargs
    assert settings["retry"].get_retries() == 0
    assert settings["socket_timeout"] > MAX_BLOCK_SECONDS
    assert settings["socket_keepalive"] is True
    assert not settings.get("decode_responses")


@pytest.mark.real_redis
@pytest.mark.parametrize("kind", ["threads", "coroutines"])
def test_so_many_may_wait_at_once_on_one_connection_pool(real_server, real_broker, kind):
    """Each of these waits takes a connection of its own for as long."""
    queue, num_waiting = real_broker.keys.queue, 120

    async def wait_in_coroutines():
        async with AsyncClient(real_server.url, queue=queue, retry_seconds=0.1) as client:
            real_broker.submit(make_request(id="g~a"))
            waits = [client.attach_group("g").wait(timeout=1) for _ in range(num_waiting)]
            return await asyncio.gather(*waits, return_exceptions=True)

    def wait_in_threads():
        real_broker.submit(make_request(id="a"))
        client = Client(real_server.url, queue=queue, retry_seconds=0.1)
        with client, ThreadPoolExecutor(num_waiting) as pool:
            handle = client.attach("a")
            waits = [pool.submit(handle.result, timeout=1) for _ in range(num_waiting)]
            return [wait.exception() for wait in waits]

    ends = wait_in_threads() if kind == "threads" else asyncio.run(wait_in_coroutines())
    assert {type(end) for end in ends} == {WaitTimeout}


@pytest.mark.real_redis
def test_a_server_of_this_machine_is_reached_by_the_path_of_its_socket(start_server, tmp_path):
    path = tmp_path / "redis.sock"
    url = f"unix://{path}"

    async def submit_in_a_loop():
        async with AsyncClient(url) as client:
            return await client.submit("x", request_id="b")

    with start_server(options=["--unixsocket", str(path)]), Client(url) as client:
        assert client.submit("x", request_id="a").status().state is State.QUEUED
        asyncio.run(submit_in_a_loop())
        assert client.status("b").state is State.QUEUED
    with (
        Client(url, retry_seconds=0.1) as client,
        pytest.raises(BrokerUnavailable, match="reached"),
    ):
        client.submit("x")


@pytest.mark.parametrize("make", [connect, connect_async])
@pytest.mark.parametrize(
    "url", ["redis://h/0?timeout=3", "rediss://h/0?cert=a", "unix:///run/redis?pasword=x"]
)
def test_an_option_of_a_url_that_is_none_is_refused_at_once(make, url):
    with pytest.raises(ValueError, match="an invalid option"):
        make(url)


@pytest.mark.parametrize("make", [connect, connect_async])
@pytest.mark.parametrize("url", ["redis://host:1/shop", "rediss://host/0x1", "redis://host/-1"])
def test_a_database_that_is_no_number_is_not_taken_for_the_first_one(make, url):
    with pytest.raises(ValueError, match="an invalid host, port or database"):
        make(url)


@pytest.mark.parametrize("make", [connect, connect_async])
@pytest.mark.parametrize(("path", "database"), [("", 0), ("/", 0), ("/3", 3), ("/?db=2", 2)])
def test_a_url_names_its_database_by_path_or_option_or_not_at_all(make, path, database):
    settings = make(f"redis://host:1{path}").connection_pool.connection_kwargs
    assert settings.get("db", 0) == database


@pytest.mark.parametrize("make", [connect, connect_async])
@pytest.mark.parametrize(
    "password", ["hush/hush", "hush#hush", "hush?hush", "hush[hush]hush", "hush@hush/hush"]
)
@pytest.mark.parametrize("url", ["redis://:{}@host:1/0", "redis+sentinel://:{}@host:1/shop"])
def test_a_password_that_breaks_its_url_is_not_told_with_the_error(make, url, password):
    with pytest.raises(ValueError, match="url") as caught:
        make(url.format(password))
    told = traceback.TracebackException.from_exception(caught.value).format_exception_only()
    assert "hush" not in "".join(told)
    # Nor with what it came from, which a program that ends with it would print.
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_a_passing_error_is_outlived():
    errors = [RedisConnectionError("lost"), BusyLoadingError("loading")]
    assert Retrying(5.0)(failing(errors)) == 3


def test_an_error_that_will_not_pass_is_raised_at_once():
    operation = failing([ResponseError("WRONGTYPE")])
    with pytest.raises(BrokerUnavailable, match="WRONGTYPE") as caught:
        Retrying(5.0)(operation)
    assert isinstance(caught.value.__cause__, ResponseError)
    assert operation() == 2


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RedisConnectionError("refused."), "Redis cannot be reached: refused."),
        (RedisTimeoutError("reading"), "Redis did not answer in time: reading"),
        (BusyLoadingError("loading"), "Redis is still loading its data: loading"),
        (
            ReadOnlyError("You can't write against a read only replica. script: ab, on 314."),
            "Redis takes no writes: it is a replica, or has become one",
        ),
        (
            MasterDownError("Link with MASTER is down"),
            "Redis takes no writes: it is a replica, or has become one",
        ),
        (AuthenticationError("WRONGPASS"), "Redis refused the user or password: WRONGPASS"),
        (
            AuthenticationError("HELLO must be called with the client already authenticated"),
            "Redis requires a password, and none was given",
        ),
        (NoPermissionError("xadd"), "Redis does not allow the command for this user: xadd"),
        (InvalidResponse('got "<"'), 'the server that answers is not Redis: got "<"'),
        (ResponseError("no such thing"), "Redis refused: no such thing"),
        (OutOfMemoryError("OOM"), "Redis has no memory left"),
    ],
)
def test_an_error_of_the_server_becomes_a_sentence_for_a_person(error, sentence):
    assert str(translated(error)) == sentence


def test_what_is_not_repeatable_is_tried_once():
    operation = failing([RedisConnectionError("lost")])
    with pytest.raises(BrokerUnavailable):
        Retrying(5.0)(operation, repeatable=False)
    assert operation() == 2


def test_a_dead_server_is_reported_within_the_bound():
    broker = Broker(connect("redis://127.0.0.1:1/0"), retry_seconds=0.3)
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable) as caught:
        broker.submit(make_request())
    assert time.monotonic() - began < 5.0
    assert isinstance(caught.value.__cause__, RedisConnectionError)


def test_a_connection_that_decodes_replies_is_refused():
    with pytest.raises(ValueError, match="decode"):
        Broker(fakeredis.FakeRedis(decode_responses=True))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"lease_seconds": 0}, "lease_seconds, .* must be 0.001 to"),
        ({"max_attempts": 0}, "attempt"),
        ({"queue": "a}b"}, "queue name"),
        ({"shard": -1}, "shard"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        Broker(fakeredis.FakeRedis(), **settings)


@pytest.fixture
def proxy(real_server):
    with wire_to(real_server.url) as proxy:
        yield proxy


@pytest.fixture
def shaky(proxy, real_broker):
    """A broker of the same queue whose replies can be lost.

    It is connected and all scripts are known to the server already: otherwise the reply that is
    lost would be one of the handshake, or the one that says that a script is unknown.
    """
    released = submit_and_claim(real_broker)
    real_broker.release([released.claim])
    finished = claim_next(real_broker)
    real_broker.commit([make_item(finished.claim, 0, 1, final=True)])
    with connect(proxy.url) as connection:
        broker = Broker(connection, queue=real_broker.keys.queue)
        broker.now_ms()
        yield broker


@pytest.mark.real_redis
def test_a_submit_whose_reply_is_lost_enqueues_once(shaky, proxy, real_broker):
    proxy.lose_reply()
    request = make_request()
    assert shaky.submit(request).request_id == request.id
    assert proxy.num_lost == 1
    assert sum(real_broker.queue_depth().values()) == 1


@pytest.mark.real_redis
def test_a_claim_whose_reply_is_lost_is_ours(shaky, proxy, real_broker):
    real_broker.submit(make_request(id="a"))
    entries = shaky.peek(count=1, block_seconds=0)
    proxy.lose_reply()
    (claimed,) = shaky.claim(entries)
    assert proxy.num_lost == 1
    assert (claimed.attempts, claimed.claim.epoch) == (1, 1)
    assert real_broker.heartbeat([claimed.claim])[0].alive


@pytest.mark.real_redis
@pytest.mark.parametrize("final", [False, True])
def test_a_commit_whose_reply_is_lost_is_in_the_log_once(shaky, proxy, real_broker, final):
    claimed = submit_and_claim(real_broker, id="a")
    proxy.lose_reply()
    (reply,) = shaky.commit([make_item(claimed.claim, 0, 3, final=final)])
    assert proxy.num_lost == 1
    assert (reply.status, reply.published) == (CommitStatus.REPLAYED, 3)


@pytest.mark.real_redis
@pytest.mark.parametrize("knows_scripts", [True, False])
def test_a_commit_of_many_requests_whose_reply_is_lost_is_in_their_logs_once(
    shaky, proxy, real_broker, real_connection, knows_scripts
):
    names = [f"r{number}" for number in range(16)]
    claims = [submit_and_claim(real_broker, id=name).claim for name in names]
    for start in (0, 1):
        # Afterwards the server knows both scripts, and this broker where its claims stand.
        replies = shaky.commit([make_item(claim, start, start + 1) for claim in claims])
        assert {reply.status for reply in replies} == {CommitStatus.OK}
    if not knows_scripts:
        real_connection.script_flush()
    proxy.lose_reply()
    replies = shaky.commit([make_item(claim, 2, 4) for claim in claims])
    assert proxy.num_lost == 1
    assert {reply.published for reply in replies} == {4}
    # The connection that broke has left no reply for those who come after.
    replies = shaky.commit([make_item(claim, 4, 5) for claim in claims])
    assert {(reply.status, reply.published) for reply in replies} == {(CommitStatus.OK, 5)}
    entries = [real_connection.xlen(real_broker.keys.output(name)) for name in names]
    assert entries == [4] * len(names)


@pytest.mark.real_redis
def test_a_commit_waits_for_a_server_that_is_away_for_a_moment(real_broker, monkeypatch):
    claimed = submit_and_claim(real_broker, id="a")
    real_broker.commit([make_item(claimed.claim, 0, 1)])
    pool, away = real_broker.connection.connection_pool, [True, True]
    get_connection = pool.get_connection

    def none_at_first(*arguments, **options):
        if away:
            away.pop()
            raise RedisConnectionError("refused")
        return get_connection(*arguments, **options)

    monkeypatch.setattr(pool, "get_connection", none_at_first)
    (reply,) = real_broker.commit([make_item(claimed.claim, 1, 2)])
    assert (reply.status, reply.published, away) == (CommitStatus.OK, 2, [])


@pytest.mark.real_redis
def test_a_release_whose_reply_is_lost_queues_once(shaky, proxy, real_broker):
    claimed = submit_and_claim(real_broker, id="a")
    proxy.lose_reply()
    assert shaky.release([claimed.claim]) == [True]
    assert (proxy.num_lost, sum(real_broker.queue_depth().values())) == (1, 1)


@pytest.mark.real_redis
@pytest.mark.parametrize(("block_seconds", "command"), [(0.0, "ZRANGE"), (0.05, "XREAD")])
def test_a_look_whose_reply_is_lost_has_taken_nothing(
    shaky, proxy, real_broker, block_seconds, command
):
    shaky.peek(count=1, block_seconds=0.05)
    if command == "ZRANGE":
        real_broker.submit(make_request(id="a"))
    proxy.lose_reply(to=command)
    with pytest.raises(BrokerUnavailable):
        shaky.peek(count=1, block_seconds=block_seconds)
    if command == "XREAD":
        real_broker.submit(make_request(id="a"))
    assert claim_next(shaky).claim.request_id == "a"


@pytest.mark.real_redis
def test_scripts_the_server_forgot_are_loaded_again(real_broker, real_connection):
    for _ in range(2):
        real_connection.script_flush()
        claimed = submit_and_claim(real_broker)
        real_connection.script_flush()
        assert real_broker.heartbeat([claimed.claim])[0].alive
        assert real_broker.commit([make_item(claimed.claim, 0, 1, final=True)])[0].published == 1


@pytest.mark.real_redis
def test_calls_made_while_another_loads_their_script_are_made_once(
    real_broker, real_connection, monkeypatch
):
    """Some are refused for the unknown script and some are run, and then all are sent again."""
    names = [f"r{number}" for number in range(6)]
    make, halves = real_connection.pipeline, []

    def pipeline(**options):
        made = make(**options)
        execute = made.execute

        def execute_while_another_loads(**options):
            middle, name = len(names) // 2, ("submit", "claim")[len(halves)]
            made.command_stack.insert(middle, (("SCRIPT LOAD", load_source(name)), {}))
            monkeypatch.setattr(real_connection, "pipeline", make)
            replies = execute(**options)
            del replies[middle]
            halves.append([isinstance(reply, NoScriptError) for reply in replies])
            return replies

        made.execute = execute_while_another_loads
        return made

    def half_known():
        real_connection.script_flush()
        monkeypatch.setattr(real_connection, "pipeline", pipeline)

    half_known()
    real_broker.submit_many([make_request(id=name) for name in names])
    assert sum(real_broker.queue_depth().values()) == len(names)
    entries = real_broker.peek(count=len(names), block_seconds=0.0)
    half_known()
    claimed = real_broker.claim(entries)
    assert halves == [[True] * 3 + [False] * 3] * 2
    assert [(answer.claim.epoch, answer.attempts) for answer in claimed] == [(1, 1)] * len(names)
    assert {reply.alive for reply in real_broker.heartbeat([a.claim for a in claimed])} == {True}


@pytest.mark.real_redis
def test_replies_are_read_alike_under_both_protocols_of_redis(real_server, real_broker):
    for protocol in (2, 3):
        with redis.Redis.from_url(real_server.url, protocol=protocol) as connection:
            broker = Broker(connection, queue=real_broker.keys.queue)
            claimed = submit_and_claim(broker)
            broker.commit([make_item(claimed.claim, 0, 2, final=True)])
            read = broker.read_output({claimed.claim.request_id: 0})
            assert read[claimed.claim.request_id].completion is not None
            connection.xadd(broker.keys.ingress(1), {"id": "gone"})
            assert broker.balance() == 1
