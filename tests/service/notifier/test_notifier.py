"""Notifiers as processes: each end is told at least once, with one id, whatever is killed."""

import asyncio
import contextlib
import re
import signal
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from quire.keys import Keys
from quire.queue.broker import Broker
from quire.queue.broker_async import AsyncBroker
from quire.records import FinishReason, State
from quire.transport.connection import connect
from quire.transport.connection_async import connect_async
from quire.transport.local_redis import URL_VARIABLE, LocalRedis
from quire.wire.ends import BatchEnd
from service.notifier.circuits import FAILURES
from service.notifier.deliveries import Deliveries
from service.notifier.endpoints import Endpoint
from service.notifier.events import (
    BATCH_EVENTS,
    EVENTS,
    GROUP_ENDED,
    REQUEST_EVENTS,
    RESPONSE_EVENTS,
    event_of_batch,
)
from service.notifier.intake import GROUP, EndIntake
from service.notifier.metrics import NotifierMetrics
from service.notifier.sending import pause_after
from service.notifier.settings import NotifierSettings
from service.shared.batches import ledger
from service.shared.batches.ledger import Ledger, ResultFile
from tests.quire.builders import claim_next, make_completion, make_item, make_request
from tests.quire.servers import needs_version_7
from tests.service.builders import eventually
from tests.service.notifier.conftest import SECRET
from tests.service.processes import LoggedProcess

ROOT = Path(__file__).parents[3]

#: How the request of a response ends.
ENDINGS = {
    "response.completed": (State.COMPLETED, FinishReason.EOS),
    "response.incomplete": (State.COMPLETED, FinishReason.LENGTH),
    "response.cancelled": (State.CANCELLED, FinishReason.CANCELLED),
    "response.failed": (State.EXPIRED, FinishReason.DEADLINE),
}

pytestmark = pytest.mark.real_redis


@pytest.fixture
def start(queue, redis_url, receiver, tmp_path):
    """Starts notifiers for the tenants `acme` and `default`.

    The time of a post is long: a receiver on a busy machine takes each, and takes it once.
    """
    flags = {
        "redis-url": redis_url,
        "queue": queue.broker.keys.queue,
        "endpoints-file": str(tmp_path / "endpoints.toml"),
        "allowed-networks": "127.0.0.0/8",
        "first-pause-seconds": "0.01",
        "longest-pause-seconds": "0.05",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]

    def start(*, path="", post_timeout_seconds=30.0, replay=True):
        entries = [
            f'[[endpoints]]\ntenant = "{tenant}"\nurl = "{receiver.url}{path}/{tenant}"\n'
            f'secrets = ["{SECRET}"]\n'
            for tenant in ("acme", "default")
        ]
        (tmp_path / "endpoints.toml").write_text("\n".join(entries))
        timeout = ("--post-timeout-seconds", str(post_timeout_seconds))
        switches = ("--allows-http", *(("--replay",) if replay else ()))
        process = LoggedProcess("service.notifier", *switches, *words, *timeout)
        return stack.enter_context(process)

    with contextlib.ExitStack() as stack:
        yield start


def end(broker: Broker, *names: str, **changes) -> None:
    for name in names:
        broker.submit(make_request(id=name, **changes))
        broker.cancel(name)


def test_a_notifier_that_is_killed_while_it_posts_loses_no_end(queue, receiver, start):
    broker = queue.broker
    receiver.may_answer.clear()
    end(broker, "a", "b", "c")
    # The second one waits for its lease, which is twice this time.
    first = start(post_timeout_seconds=0.5)
    receiver.wait(lambda: len({*receiver.ids}) == 3)
    first.signal(signal.SIGKILL)
    first.wait()
    receiver.may_answer.set()
    end(broker, "d", tenant="acme")
    end(broker, "e", tenant="nobody")
    # What the first one has sent may come to the receiver still.
    second = start(path="/again")

    def told_again() -> set[str]:
        both = zip(receiver.ids, receiver.paths, strict=True)
        return {webhook_id for webhook_id, path in both if path.startswith("/again/")}

    receiver.wait(lambda: len(told_again()) == 4)
    told = {}
    for webhook_id, body in receiver.got:
        told.setdefault(body["data"]["request_id"], set()).add(webhook_id)
    # Each end has one id, and was told again by the second notifier.
    assert sorted(told) == ["a", "b", "c", "d"]
    assert all(len(ids) == 1 for ids in told.values())
    assert told_again() == set.union(*told.values())
    second.signal(signal.SIGTERM)
    assert second.wait() == 0
    assert queue.connection.zcard(f"{broker.keys.prefix}:hook:due") == 0
    assert queue.connection.hgetall(f"{broker.keys.prefix}:hook:counts") == {}


def test_the_first_notifier_of_a_queue_begins_with_the_next_end(queue, receiver, start):
    end(queue.broker, "a", "b")
    first = start(replay=False)
    first.wait_for_event("notifier ready")
    end(queue.broker, "c")
    receiver.wait(lambda: bool(receiver.got))
    first.signal(signal.SIGKILL)
    first.wait()
    end(queue.broker, "d")
    # A flag for the past does not bring it back to a group that is there.
    start()
    receiver.wait(lambda: len({*receiver.ids}) == 2)
    assert {body["data"]["request_id"] for _, body in receiver.got} == {"c", "d"}


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


def end_batch(queue, status: str) -> str:
    """A batch that ends so; returns its id."""
    records = Ledger(queue.connection, queue.broker.keys.queue)
    keys, run, batch_id = records.keys, records.run, f"batch_{status}"
    run(ledger.reserve_file(keys, "file-1", tenant="acme"))
    run(ledger.publish_file(keys, "file-1", tenant="acme", seconds=60, max_files=9, fields={}))
    fields = {"endpoint": "/v1/completions", "input_file_id": "file-1", "completion_window": "1m"}
    run(
        ledger.create_batch(
            keys,
            batch_id,
            tenant="acme",
            digest="d",
            input_file_id="file-1",
            window_ms=60_000,
            max_open=9,
            max_records=9,
            fields=fields,
        )
    )
    hold = run(ledger.claim_batch(keys, batch_id, lease_ms=60_000))
    record = run(ledger.read_batch(keys, batch_id))
    none = ResultFile()
    run(
        ledger.finish_batch(
            keys,
            hold,
            record,
            status=status,
            keep_ms=60_000,
            output_ms=60_000,
            output=none,
            errors=none,
            fields={"total": 5, "completed": 3, "failed": 2},
        )
    )
    return batch_id


def test_openais_client_reads_the_ends_of_batches_and_responses(queue, receiver, start):
    broker = queue.broker
    names = {kind: f"resp_{number:032x}" for number, kind in enumerate(RESPONSE_EVENTS)}
    for kind, name in names.items():
        broker.submit(make_request(id=name, tenant="acme"))
        claim = claim_next(broker).claim
        state, reason = ENDINGS[kind]
        completion = make_completion(name, state=state, finish_reason=reason)
        broker.commit([replace(make_item(claim, 0, 1), completion=completion)])
    names |= {kind: end_batch(queue, kind.removeprefix("batch.")) for kind in BATCH_EVENTS}
    port = start().wait_for_event("notifier ready")["http_port"]
    receiver.wait(lambda: len(receiver.got) == len(names))
    openai = OpenAI(api_key="unused", webhook_secret=SECRET)
    events = [openai.webhooks.unwrap(body, headers) for body, headers in receiver.raw]
    assert {event.type: event.data.id for event in events} == names
    assert [event.id for event in events] == receiver.ids
    assert all(type(event).__name__.endswith("WebhookEvent") for event in events)
    bodies = {body["type"]: body for _, body in receiver.got}
    assert bodies["batch.expired"]["data"]["request_counts"] == {
        "total": 5,
        "completed": 3,
        "failed": 2,
    }

    def samples() -> dict[str, float]:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
            found = text_string_to_metric_families(reply.read().decode())
            return {
                " ".join((one.name, *one.labels.values())): one.value
                for family in found
                for one in family.samples
            }

    def counts() -> list[float]:
        found = samples()
        names = ("posts_total taken", "ends_total kept", "delay_seconds_count")
        return [found[f"quire_notifier_{name}"] for name in (*names, "queue_webhooks due")]

    # The answer reaches the receiver's side first.
    eventually(lambda: counts() == [8, 8, 8, 0], "all are taken")
    for path in ("livez", "readyz"):
        with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=30) as reply:
            assert reply.status == 200


def test_the_webhook_of_an_end_is_a_function_of_what_ended():
    batch = BatchEnd("1-0", "batch_1", "acme", "expired", 5, 3, 2, created_at=1.0, ended_at=2.0)
    again = event_of_batch(replace(batch, position="9-0", ended_at=9.0), queue="q")
    first = event_of_batch(batch, queue="q")
    assert first.webhook_id == again.webhook_id
    others = [replace(batch, status="failed"), replace(batch, batch_id="batch_2")]
    ids = {event_of_batch(other, queue="q").webhook_id for other in others}
    assert len({*ids, first.webhook_id, event_of_batch(batch, queue="p").webhook_id}) == 4


def test_a_redis_user_of_its_own_may_do_all_this(monkeypatch):
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    page = (ROOT / "docs" / "reference" / "acl.md").read_text()
    (rules,) = re.findall(r"^ACL SETUSER notifier (.*?)^```", page, re.MULTILINE | re.DOTALL)
    with LocalRedis.start() as server, connect(server.url) as connection:
        needs_version_7(connection)
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
                metrics = NotifierMetrics(num_open_circuits=int)
                endpoints = {"default": endpoint}
                intake = EndIntake([shard], shard, deliveries, endpoints, "one", metrics=metrics)
                await intake.keep(await shard.take_over(GROUP, "one", idle_seconds=0))
                await intake.keep(await shard.deliver(GROUP, "one"))
                assert (await shard.delivered(GROUP, "one")).positions == []
                # The third, the end of the group, was one too many.
                taken = await deliveries.take(count=9, lease_seconds=60)
                first, second = taken.pending
                again = await deliveries.take(count=9, lease_seconds=60)
                assert (again.pending, again.num_due, again.num) == ([], 0, 2)
                await deliveries.defer(first, seconds=0, was_tried=True)
                (again,) = (await deliveries.take(count=9, lease_seconds=60)).pending
                assert (again.webhook_id, again.attempts) == (first.webhook_id, 1)
                circuits = deliveries.circuits
                opened = [await circuits.fail("default") for _ in range(FAILURES)]
                assert opened == [False] * (FAILURES - 1) + [True]
                assert not await circuits.enter("default", first.member, attempts=1)
                await circuits.close("default")
                (again,) = (await deliveries.take(count=9, lease_seconds=60)).pending
                assert again.webhook_id == first.webhook_id
                for pending in (first, second, second):
                    await deliveries.forget(pending.tenant, pending.webhook_id)
                await deliveries.defer(first, seconds=0, was_tried=True)

        asyncio.run(work())
        kept = [*connection.scan_iter("quire:{default.0}:hook:*")]
        assert kept == []


def test_pauses_grow_to_hours_and_no_further():
    settings = NotifierSettings()
    first, second, *_, last = [pause_after(n, settings=settings) for n in (0, 1, 5, 10_000)]
    assert 2.5 <= first <= 5.0
    assert 10.0 <= second <= 20.0
    assert 7200.0 <= last <= 14_400.0


def test_the_states_of_requests_are_the_types_of_webhooks():
    ends = {f"request.{state}" for state in State if state.is_terminal}
    assert {*REQUEST_EVENTS} == ends
    assert {*EVENTS} >= ends | {GROUP_ENDED}


def test_a_cancellation_that_redis_py_swallows_ends_the_task_all_the_same():
    async def swallowing(*_):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return 1

    async def work():
        deliveries = Deliveries(connect_async("redis://127.0.0.1:1"), Keys(), most_per_tenant=1,
                                life_ms=1)  # fmt: skip
        deliveries._forget = swallowing
        task = asyncio.create_task(deliveries.forget("acme", "msg_1"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
