"""Who keeps a claim and who loses it: heartbeat, watchdog, reaper."""

import contextlib
import threading
import time

import pytest
import redis.exceptions

from quire.errors import BrokerUnavailable
from quire.queue.broker import Broker
from quire.queue.request.arguments import MAX_ITEMS_PER_CALL
from quire.transport.connection import translated
from service.worker.model.served import ServedModel
from service.worker.observe.metrics import Metrics
from service.worker.observe.vitals import Vitals
from service.worker.outgoing.contact import Contact
from service.worker.outgoing.leases import Housekeeper
from service.worker.settings.combinations import KEPT_LEASES
from service.worker.settings.config import Settings
from tests.quire.builders import pass_moment
from tests.service.builders import (
    LEASE_SECONDS,
    SHORT_LEASE_SECONDS,
    Clock,
    Queue,
    StepGate,
    WorkerThread,
    eventually,
    expected_tokens,
    private_redis,
    stays,
)
from tests.service.fake_model import fake_model


@pytest.mark.parametrize("share", [0.4999, 0.501])
def test_what_a_worker_leaves_that_dies_lasts_its_lease_and_one_more(queue: Queue, share: float):
    """The least time that settings allow, when it was last renewed just before or just after.

    In leases of an hour, a hundredth is longer than what comes between two calls.
    """
    lease_seconds = 3600.0
    kept_ms = int(KEPT_LEASES * lease_seconds * 1000)
    halves = dict.fromkeys(("max_queue_seconds", "retention_seconds"), kept_ms / 2000)
    settings = queue.settings(lease_seconds=lease_seconds, **halves)
    broker = Broker(queue.connection, queue=queue.name, lease_seconds=lease_seconds, **halves)
    request_id = queue.submit()
    (claimed,) = broker.claim(broker.peek(count=1, block_seconds=0))
    record = queue.keys.request(request_id)
    queue.connection.pexpire(record, int(share * kept_ms))
    broker.heartbeat([claimed.claim])
    assert queue.connection.pttl(record) > 1000 * settings.lease_seconds * 1.99


def test_a_claim_is_kept_through_a_step_longer_than_its_lease(queue: Queue):
    gate = StepGate(steps=2)
    request_id = queue.submit((6, 6), max_tokens=20)
    with WorkerThread(queue.settings(), before_run=gate):
        queue.wait_for_tokens(request_id, 2)
        with WorkerThread(queue.settings()):
            # A second worker stands ready to reap, and nothing is committed meanwhile.
            stays(lambda: resumes(queue, request_id) == 0, seconds=1.5 * LEASE_SECONDS)
            gate.open()
            output = queue.result(request_id)
    assert (output.completion.attempts, output.completion.resumes) == (1, 0)


def test_after_an_outage_longer_than_a_lease_no_living_worker_loses_a_claim():
    """Every lease has run out by then; their owner is heard before anybody reaps."""
    with private_redis() as server:
        queue, gate = Queue.at(server.url), StepGate(steps=0)
        ids = [queue.submit((number, 6), max_tokens=200) for number in (1, 2)]
        first = WorkerThread(queue.settings(), before_run=gate)
        with first, contextlib.ExitStack() as stack:
            gate.step_until(lambda: all(queue.published(id_) >= 1 for id_ in ids))
            other = stack.enter_context(WorkerThread(queue.settings()))
            eventually(lambda: other.get("/readyz")[0] == 200)
            server.kill()
            back = time.monotonic() + 1.2 * LEASE_SECONDS
            eventually(lambda: time.monotonic() > back)
            server.restart()
            stays(lambda: all(resumes(queue, id_) == 0 for id_ in ids), seconds=1.5 * LEASE_SECONDS)
            gate.open()
            outputs = [queue.result(request_id) for request_id in ids]
        assert other.metric("quire_leases_reaped_total", queue=queue.name) == 0
    for number, output in zip((1, 2), outputs, strict=True):
        assert output.token_ids == expected_tokens((number, 6), max_tokens=200)
        assert (output.completion.attempts, output.completion.resumes) == (1, 0)


@pytest.fixture
def contact(queue: Queue, clock: Clock) -> Contact:
    """The books of a worker that has just begun, and keeps house for the queue."""
    vitals = Vitals(stall_timeout_seconds=60.0, clock=clock)
    metrics = Metrics(model="fake", queue=queue.name)
    return Contact(vitals, metrics, silence_seconds=10.0, clock=clock)


@pytest.fixture
def keeper(queue: Queue, clock: Clock, contact: Contact) -> Housekeeper:
    return Housekeeper(
        {0: queue.broker}, worker="keeper", load=lambda _: {}, on_drain=lambda: None,
        vitals=Vitals(stall_timeout_seconds=60.0, clock=clock), contact=contact,
        metrics=Metrics(model="fake", queue=queue.name), lease_seconds=10.0, clock=clock,
    )  # fmt: skip


@pytest.fixture
def orphan(queue: Queue) -> str:
    """A request whose worker died long ago."""
    request_id = queue.submit()
    queue.broker.claim(queue.broker.peek(count=1, block_seconds=0.0))
    queue.connection.zadd(queue.keys.lease, {request_id: 1})
    return request_id


def test_requests_that_were_scheduled_for_one_moment_are_queued_at_once(
    queue: Queue, keeper: Housekeeper
):
    later = queue.broker.now_ms() + 3_600_000
    names = [f"due-{number}" for number in range(2 * MAX_ITEMS_PER_CALL + 1)]
    for name in names:
        queue.submit(id=name, not_before_ms=later)
    queue.connection.zadd(queue.keys.delay, dict.fromkeys(names, 1))
    assert keeper.promote()
    assert sum(queue.broker.queue_depth().values()) == len(names)


def test_all_that_a_large_worker_left_is_reaped_at_once(
    queue: Queue, clock: Clock, keeper: Housekeeper
):
    names = [f"left-{number}" for number in range(2 * MAX_ITEMS_PER_CALL + 1)]
    for name in names:
        queue.submit(id=name)
    queue.broker.claim(queue.broker.peek(count=len(names), block_seconds=0.0))
    queue.connection.zadd(queue.keys.lease, dict.fromkeys(names, 1))
    for _ in range(2):
        clock.now += 10.0
        assert keeper.tidy()
    assert sum(queue.broker.queue_depth().values()) == len(names)


REFUSED = redis.exceptions.NoPermissionError("this user may not")
AWAY = redis.exceptions.ConnectionError("nobody there")


@pytest.mark.parametrize(
    "gap",
    [
        ("read", AWAY),
        ("commit", redis.exceptions.TimeoutError()),
        ("commit", redis.exceptions.ReadOnlyError()),
        ("heartbeat", REFUSED),
        None,
    ],
    ids=["nobody there", "no answer", "a replica", "a refused sign of life", "a silence"],
)
def test_a_keeper_reaps_only_when_the_others_had_a_lease_s_time_to_be_heard(
    queue: Queue,
    clock: Clock,
    contact: Contact,
    keeper: Housekeeper,
    orphan: str,
    gap: tuple[str, redis.exceptions.RedisError] | None,
):
    if gap is None:
        clock.now += 60.0
    else:
        # Since its beginning nothing has spoken against it.
        for _ in range(10):
            clock.now += 6.0
            contact.call("beat", lambda: None)
        fails(contact, *gap)
    reaped = []
    # The first time it is heard itself, then not quite a lease later, and then after one.
    for seconds in (0.0, 9.0, 1.0):
        clock.now += seconds
        assert keeper.tidy()
        reaped.append(queue.broker.status(orphan).state == "queued")
    assert reaped == [False, False, True]


@pytest.mark.parametrize("is_gone", [False, True], ids=["an older word", "no word"])
def test_a_keeper_whose_word_was_forgotten_gives_the_others_a_lease_s_time_to_be_heard(
    queue: Queue,
    clock: Clock,
    contact: Contact,
    keeper: Housekeeper,
    orphan: str,
    is_gone: bool,
):
    """A server that was back at once with old data: no call has failed, and no lease is certain."""
    workers = queue.keys.workers
    assert keeper.tidy()
    before = queue.connection.hget(workers, "keeper")
    pass_moment(queue.broker)
    clock.now += 9.0
    assert keeper.tidy()
    if is_gone:
        queue.connection.delete(workers)
    else:
        queue.connection.hset(workers, "keeper", before)
    reaped = []
    # A lease after its beginning, then not quite a lease later, and then after one.
    for seconds in (1.0, 9.0, 1.0):
        clock.now += seconds
        assert keeper.tidy()
        reaped.append(queue.broker.status(orphan).state == "queued")
    assert reaped == [False, False, True]


def test_a_registry_that_is_none_keeps_a_worker_from_no_housekeeping(
    queue: Queue, clock: Clock, keeper: Housekeeper, orphan: str
):
    queue.connection.set(queue.keys.workers, "not a registry", ex=60)
    for _ in range(2):
        clock.now += 10.0
        assert keeper.tidy()
    assert queue.broker.status(orphan).state == "queued"


@pytest.mark.parametrize("error", [REFUSED, AWAY], ids=["refused", "never through"])
def test_what_a_worker_alone_cannot_do_keeps_it_from_no_housekeeping(
    queue: Queue,
    clock: Clock,
    contact: Contact,
    keeper: Housekeeper,
    orphan: str,
    error: redis.exceptions.RedisError,
):
    """A commit that fails on and on says nothing of the others: their heartbeats are heard."""
    for _ in range(6):
        clock.now += 2.0
        fails(contact, "commit", error)
        assert keeper.tidy()
    assert queue.broker.status(orphan).state == "queued"


@pytest.mark.parametrize("seconds", [2.0, 10.0])
def test_what_is_cut_off_now_and_then_keeps_a_worker_from_no_housekeeping(
    queue: Queue, clock: Clock, contact: Contact, keeper: Housekeeper, orphan: str, seconds: float
):
    """As a read, where something between ends every connection that is some minutes old."""
    for operation in ("read", "commit", "recover") * 2:
        clock.now += seconds
        fails(contact, operation, AWAY)
        contact.call(operation, lambda: None)
        assert keeper.tidy()
    assert queue.broker.status(orphan).state == "queued"


def test_what_is_refused_now_and_then_keeps_a_worker_from_no_housekeeping(
    queue: Queue, clock: Clock, contact: Contact, keeper: Housekeeper, orphan: str
):
    """As a commit that waits for a disk, some of which are in time."""
    for _ in range(6):
        clock.now += 2.0
        fails(contact, "commit", REFUSED)
        contact.call("commit", lambda: None)
        assert keeper.tidy()
    assert queue.broker.status(orphan).state == "queued"


def fails(contact: Contact, operation: str, cause: redis.exceptions.RedisError) -> None:
    """A call of a worker that ends with this error of its connection."""

    def call() -> None:
        raise translated(cause)

    with pytest.raises(BrokerUnavailable):
        contact.call(operation, call)


def resumes(queue: Queue, request_id: str) -> int:
    return queue.broker.status(request_id).resumes


def test_a_stalled_engine_loses_its_claims_and_another_worker_goes_on(queue: Queue):
    gate = StepGate(steps=3)
    request_id = queue.submit((6, 7), max_tokens=20)
    short = {"lease_seconds": SHORT_LEASE_SECONDS}
    settings = queue.settings(stall_timeout_seconds=0.2, **short)
    with WorkerThread(settings, before_run=gate) as stalled:
        queue.wait_for_tokens(request_id, 3)
        eventually(lambda: stalled.get("/livez")[0] == 503)
        with WorkerThread(queue.settings(**short)):
            output = queue.result(request_id)
            assert output.token_ids == expected_tokens((6, 7), max_tokens=20)
            assert (output.completion.resumes, output.chunks[-1].epoch > 1) == (1, True)
        gate.open()
        stalled.wait_for_end("lost")
        eventually(lambda: stalled.get("/livez")[0] == 200)
    assert queue.result(request_id) == output


def test_a_worker_takes_its_own_request_again_without_mixing_the_two_lives(queue: Queue):
    """Its lease ran out while the engine stood still, and nobody else was there to take over."""
    gate = StepGate(steps=3)
    request_id = queue.submit((6, 8), max_tokens=40)
    short = {"lease_seconds": SHORT_LEASE_SECONDS}
    settings = queue.settings(stall_timeout_seconds=0.2, max_num_seqs=4, **short)
    with WorkerThread(settings, before_run=gate) as worker:
        queue.wait_for_tokens(request_id, 3)
        queue.wait_for_state(request_id, "queued")
        stays(lambda: queue.broker.status(request_id).state == "queued")
        gate.open()
        output = queue.result(request_id)
    assert worker.metric("quire_leases_reaped_total", queue=queue.name) >= 1
    assert output.token_ids == expected_tokens((6, 8), max_tokens=40)
    assert output.completion.resumes == 1
    queue.assert_at_rest()


def test_a_claim_lost_and_made_again_by_the_same_busy_engine_gets_only_its_own_tokens(
    queue: Queue,
):
    gate = StepGate(steps=3)
    request_id = queue.submit((6, 8), max_tokens=40)
    with WorkerThread(queue.settings(lease_seconds=60.0), before_run=gate):
        queue.wait_for_tokens(request_id, 3)
        queue.take_away(request_id)
        # The engine stands in a step of the first life while intake brings the second.
        eventually(lambda: resumes(queue, request_id) == 1)
        gate.open()
        output = queue.result(request_id)
    assert output.token_ids == expected_tokens((6, 8), max_tokens=40)
    assert output.completion.resumes == 1
    queue.assert_at_rest()


def test_a_scheduled_request_is_served_when_it_is_due_and_not_before(queue: Queue):
    due_ms = queue.broker.now_ms() + 700
    request_id = queue.submit((6, 1), max_tokens=3, not_before_ms=due_ms)
    assert queue.broker.status(request_id).state == "scheduled"
    with WorkerThread(queue.settings()):
        queue.result(request_id)
        assert queue.broker.now_ms() >= due_ms


def test_workers_sign_the_registry_with_state_load_and_abilities(queue: Queue):
    settings = queue.settings(worker_name="signed")
    with WorkerThread(settings):
        eventually(lambda: [w.state for w in queue.broker.workers()] == ["ready"])
        (info,) = queue.broker.workers()
        assert info.name == "signed"
        assert set(info.load) == {
            "claims", "running", "grammars", "max_model_len",
            "waiting", "prefilling", "decoding", "preempted", "kv_usage", "generated",
        }  # fmt: skip
        assert info.load["grammars"] == 1
        queue.result(queue.submit((6, 1), max_tokens=5))
        eventually(lambda: queue.broker.workers()[0].load["generated"] == 5)
    (info,) = queue.broker.workers()
    assert info.state == "stopped"


def test_the_registry_is_told_at_once_when_a_worker_is_ready_and_when_it_drains(queue: Queue):
    """At the next turn of the keeper, and not half a lease later."""

    def signed(state: str) -> bool:
        return [worker.state for worker in queue.broker.workers()] == [state]

    loading, gate = threading.Event(), StepGate(steps=2)

    def load(settings: Settings) -> ServedModel:
        assert loading.wait(20)
        return fake_model(settings, before_run=gate)

    # With such a lease nothing is due again within the test.
    with WorkerThread(queue.settings(lease_seconds=600.0), load=load) as worker:
        eventually(lambda: signed("loading"))
        loading.set()
        eventually(lambda: signed("ready"))
        queue.submit((6, 6), max_tokens=20)
        eventually(lambda: gate.batches)
        worker.worker.stop()
        eventually(lambda: signed("draining"))
        gate.open()
        assert worker.wait() == 0
    assert signed("stopped")
