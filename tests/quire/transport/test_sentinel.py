"""Other ways to a server: through its sentinels, across a failover, and under TLS."""

import asyncio
import contextlib
import json
import signal
import threading
import traceback

import pytest
import redis
import redis.asyncio.sentinel
import redis.sentinel

from quire.cli import main
from quire.cli.sources import with_password
from quire.errors import BrokerUnavailable
from quire.queue.broker import Broker
from quire.transport.connection import connect
from quire.transport.connection_async import connect_async
from quire.transport.local_redis import URL_VARIABLE, LocalRedis, free_port
from quire.transport.retrying import Retrying
from quire.transport.sentinel import connect_through_sentinels
from quire.transport.urls import parts_of
from quire.wire.output import State
from tests.quire.builders import make_request, port_of
from tests.quire.certificates import NO_TLS, files_of, make_certificate
from tests.quire.sentinels import replicas_known_to, started_sentinel
from tests.quire.servers import PORT_ATTEMPTS, real_program
from tests.quire.waiting import eventually

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(90)]


@pytest.fixture(scope="module")
def start():
    """Starts servers of our own; skips where there is none to start."""
    real_program()
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).delenv(URL_VARIABLE, raising=False)
        yield lambda *options: stack.enter_context(LocalRedis.start(options=options))


@pytest.fixture(scope="module")
def sentinel(start, tmp_path_factory):
    """A master with one replica, and a sentinel that knows both. Yields the sentinel's port."""
    master = start("--appendonly", "no")
    start("--replicaof", "127.0.0.1", port_of(master))
    with started_sentinel(tmp_path_factory.mktemp("sentinel"), port_of(master)) as port:
        with redis.Redis(port=port) as asked:
            eventually(lambda: replicas_known_to(asked) == 1)
        yield port


def switch_over(sentinel: int) -> int:
    """Has the replica promoted, while the old master takes itself for one still; the new port."""
    with redis.Redis(port=sentinel) as asked:
        # Where clients find it; the address by name is that of the new one some moments earlier.
        before = asked.sentinel_master("shop")["port"]
        # Refused while the sentinel has not heard of the replica for some seconds.
        eventually(lambda: bool(asked.execute_command("SENTINEL FAILOVER", "shop")))
        eventually(lambda: asked.sentinel_master("shop")["port"] != before)
        with redis.Redis(port=before) as old:
            assert old.info("replication")["role"] == "master"
        return int(asked.sentinel_master("shop")["port"])


def test_a_queue_goes_on_at_the_new_master_though_the_one_before_lives_on(sentinel, monkeypatch):
    """That one is demoted some ten seconds later, and all that it was told until then is lost."""
    monkeypatch.setattr("quire.transport.sentinel.BELIEF_SECONDS", 0.0)
    monkeypatch.setattr("quire.transport.sentinel._ASKING_SHARE", float("inf"))
    url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel}/shop/0"
    switched = list[int]()

    async def ports_of_a_loop() -> list[int]:
        async with connect_async(url) as connection:
            pool = connection.connection_pool
            in_use = await pool.get_connection()
            switched.append(await asyncio.to_thread(switch_over, sentinel))
            found = [(await connection.info("server"))["tcp_port"]]
            await pool.release(in_use)
            both = [await pool.get_connection() for _ in range(2)]
            for each in both:
                await pool.release(each)
            return [*found, *(each.port for each in both)]

    with connect(url) as connection:
        broker, pool = Broker(connection), connection.connection_pool
        broker.ensure_groups()
        broker.submit(make_request(id="before"))
        eventually(lambda: connection.wait(1, 1000) == 1)
        in_use = pool.get_connection()
        ports = asyncio.run(ports_of_a_loop())
        assert broker.submit(make_request(id="after")).state is State.QUEUED
        assert broker.status("before").state is State.QUEUED
        ports.append(connection.info("server")["tcp_port"])
        pool.release(in_use)
        both = [pool.get_connection() for _ in range(2)]
        for each in both:
            pool.release(each)
    assert [*ports, *(each.port for each in both)] == switched * 6


def test_what_an_interrupted_read_left_unread_is_no_answer_to_the_next(sentinel, interrupted_by):
    """Redis' own answer to a read that blocked is on its way when the next call is made."""
    main = threading.get_ident()
    with connect(f"redis+sentinel://127.0.0.1:{sentinel}/shop/0") as connection:
        connection.set("key", "value")

        def interrupt() -> None:
            with redis.Redis(connection_pool=connection.connection_pool) as other:
                eventually(lambda: other.info("clients")["blocked_clients"] == 1)
            signal.pthread_kill(main, interrupted_by)

        helper = threading.Thread(target=interrupt)
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            # Nearly as long as the socket waits: a busy machine comes to the interruption before.
            connection.blpop(["nothing"], timeout=4)
        helper.join()
        assert connection.get("key") == b"value"


def test_what_the_sentinels_said_is_believed_while_none_answers(start, tmp_path, monkeypatch):
    master = start()
    with started_sentinel(tmp_path, port_of(master)) as port:
        connection = connect(f"redis+sentinel://127.0.0.1:{port}/shop/0")
        eventually(connection.ping)
    monkeypatch.setattr("quire.transport.sentinel.BELIEF_SECONDS", 0.0)
    with connection:
        assert connection.ping()


def test_sentinels_that_know_no_master_are_a_broker_that_is_not_there(sentinel):
    url = f"redis+sentinel://127.0.0.1:{sentinel}/nobody"
    with connect(url) as connection, pytest.raises(BrokerUnavailable, match="No master found"):
        Broker(connection, retry_seconds=0.1).submit(make_request())


@pytest.mark.parametrize("kind", [redis.sentinel, redis.asyncio.sentinel])
def test_what_a_sentinel_does_not_find_is_told_without_the_settings_of_its_connection(kind):
    """As redis-py 6.4 to 7.1 say it, and what whoever does not catch our error would print."""
    said = "No master found for 'queue' : <Redis(<Connection(db=0,password=secret)>)> - refused"

    def find() -> None:
        raise kind.MasterNotFoundError(said)

    with pytest.raises(BrokerUnavailable) as told:
        Retrying(0.0)(find)
    assert str(told.value) == "Redis cannot be reached: No master found for 'queue'"
    assert "secret" not in "".join(traceback.format_exception(told.value))


def test_a_sentinel_url_is_read_with_all_its_parts():
    url = "rediss+sentinel://us%40er:p%3Ass@one:1,[::1]:2,three/shop/7?sentinel_password=x"
    pool = connect_through_sentinels(url, {"socket_timeout": 5.0}).connection_pool
    settings = pool.connection_kwargs
    assert (settings["username"], settings["password"], settings["db"]) == ("us@er", "p:ss", 7)
    hosts = [s.connection_pool.connection_kwargs for s in pool.sentinel_manager.sentinels]
    assert [(h["host"], h["port"]) for h in hosts] == [("one", 1), ("::1", 2), ("three", 26379)]
    assert {h["password"] for h in hosts} == {"x"}
    assert issubclass(pool.connection_class, redis.sentinel.SentinelManagedSSLConnection)
    plain = connect("redis+sentinel://one/shop").connection_pool
    assert plain.connection_kwargs["socket_timeout"] == 5.0
    assert plain.connection_kwargs["retry"].get_retries() == 0


@pytest.mark.parametrize("hosts", ["[::1]:2,one", "one,[::1]:2", "a:b@one:1,[fe80::1],[::1]:2"])
def test_an_address_in_brackets_may_stand_beside_other_hosts(hosts):
    """Whatever this Python thinks of it: its versions differ."""
    parts = parts_of(f"redis+sentinel://{hosts}/shop/7?sentinel_password=x")
    assert (parts.netloc, parts.path, parts.query) == (hosts, "/shop/7", "sentinel_password=x")
    assert parts_of(parts.geturl()) == parts
    assert with_password(f"redis+sentinel://{hosts}/shop", "p/w").count("@") == 1
    for wrong in (f"{hosts}[", f"a]{hosts}", f"{hosts},b[::1]", f"[a]@{hosts}"):
        with pytest.raises(ValueError, match="brackets"):
            parts_of(f"redis+sentinel://{wrong}/shop")


@pytest.mark.parametrize("rest", ["", "/shop", "host/", "host/shop/x", "host:x/shop"])
def test_a_sentinel_url_that_cannot_be_right_is_refused(rest):
    with pytest.raises(ValueError, match="host"):
        connect(f"redis+sentinel://{rest}")


@pytest.mark.parametrize("make", [connect, connect_async])
@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+sentinel://host/shop?socket_timeout=3", "no option 'socket_timeout'"),
        ("redis+sentinel://host/shop?ssl_ca_certs=ca.pem", "for the scheme rediss"),
        ("rediss+sentinel://host/shop?ssl_check_hostname=", "has no value"),
        ("rediss+sentinel://host/shop?ssl_ca_cert=ca.pem", "an invalid option: .*'ssl_ca_cert'"),
        ("rediss+sentinel://host/shop?ssl_cert_reqs=mostly", "an invalid option: .*mostly"),
    ],
)
def test_an_option_of_a_sentinel_url_that_would_not_be_heeded_is_refused(make, url, reason):
    with pytest.raises(ValueError, match=reason):
        make(url)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The folder of a certificate that signed itself, and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder)
    return folder


@pytest.fixture(scope="module")
def secured(start, certificate):
    """A server under TLS. Yields its port."""
    for attempt in range(PORT_ATTEMPTS):
        port = free_port()
        try:
            start("--tls-port", str(port), "--tls-auth-clients", "no", *files_of(certificate))
        except BrokerUnavailable as error:
            if any(text in str(error) for text in NO_TLS):
                pytest.skip("this server was built without TLS")
            # Another process may have taken the port.
            if attempt == PORT_ATTEMPTS - 1:
                raise
        else:
            break
    return port


@pytest.mark.distribution
def test_a_queue_is_reached_under_tls_by_those_who_trust_its_certificate(secured, certificate):
    assert_only_who_trusts_reaches(f"rediss://127.0.0.1:{secured}/0", certificate / "cert.pem")


@pytest.mark.distribution
@pytest.mark.parametrize("is_secured", [True, False])
def test_a_command_with_the_scheme_of_the_other_kind_of_server_asks_for_it(
    secured, start, is_secured, capsys, monkeypatch, tmp_path
):
    """Under TLS it would wait for an answer, without it it is cut off; neither says why."""
    if is_secured:
        url = f"redis://127.0.0.1:{secured}/0"
        told = "if this server has TLS, begin the url with `rediss://`"
    else:
        url = f"rediss://127.0.0.1:{port_of(start())}/0?socket_timeout=0.2"
        told = "if this server has no TLS, begin the url with `redis://`"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    monkeypatch.setattr("quire.batch.batch.OUTAGE_SECONDS", 0.1)
    (tmp_path / "in").write_text(json.dumps(line))
    batch = ["run-batch", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    for command in (["status"], ["submit", "x"], ["doctor", "--no-torch"], batch):
        assert main([*command, "--redis-url", url]) == 1
        assert told in "".join(capsys.readouterr())


@pytest.mark.parametrize("make", [connect, connect_async])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("ssl_ca_certs={0}/none.pem", "ssl_ca_certs={0}/none.pem: No such file"),
        ("ssl_ca_certs={0}", "ssl_ca_certs={0}: Is a directory"),
        ("ssl_ca_certs={0}/key.pem", "ssl_ca_certs={0}/key.pem: .*certificate"),
        ("ssl_certfile={0}/cert.pem&ssl_keyfile={0}/none", "ssl_keyfile={0}/none: No such file"),
        ("ssl_certfile={0}/key.pem&ssl_keyfile={0}/key.pem", "ssl_certfile={0}/key.pem, "),
    ],
)
def test_files_of_a_url_that_cannot_be_used_are_refused_by_their_names(
    certificate, make, options, reason
):
    """Otherwise a server would be waited for that is there."""
    folder = certificate
    for url in ("rediss://127.0.0.1:1/0", "rediss+sentinel://127.0.0.1:1/shop"):
        with pytest.raises(ValueError, match=reason.format(folder)):
            make(f"{url}?{options.format(folder)}")
        make(f"{url}?ssl_certfile={folder}/cert.pem&ssl_keyfile={folder}/key.pem")


@pytest.mark.distribution
def test_a_queue_under_tls_is_found_by_sentinels_and_trusted_alike(secured, certificate, tmp_path):
    folder = certificate
    options = ["tls-replication yes", f"tls-ca-cert-file {folder / 'cert.pem'}"]
    options += [f"tls-{name}-file {folder / name}.pem" for name in ("cert", "key")]
    with started_sentinel(tmp_path, secured, *options) as sentinel:
        with redis.Redis(port=sentinel) as asked:
            eventually(lambda: not asked.sentinel_master("shop")["is_disconnected"])
        url = f"rediss+sentinel://127.0.0.1:{sentinel}/shop/0"
        assert_only_who_trusts_reaches(url, folder / "cert.pem")


def assert_only_who_trusts_reaches(url, certificate):
    with connect(f"{url}?ssl_ca_certs={certificate}") as connection:
        broker, request = Broker(connection, queue="tls"), make_request()
        assert broker.submit(request).created
        assert connection.exists(broker.keys.request(request.id))
    told = "the certificate of Redis is not trusted, see `ssl_ca_certs`"
    with connect(url) as stranger, pytest.raises(BrokerUnavailable, match=told):
        Broker(stranger, queue="tls", retry_seconds=0.1).status("a")
