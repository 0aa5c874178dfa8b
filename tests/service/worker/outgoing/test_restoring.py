"""What Redis loses of the queue around open requests comes back by the workers' housekeeping."""

import pytest
import redis

from quire.queue.repair.restore import OPEN_PER_TURN, Lost
from quire.transport.connection import translated
from service.worker.observe.metrics import Metrics
from service.worker.observe.vitals import Vitals
from service.worker.outgoing.contact import Contact
from service.worker.outgoing.leases import Housekeeper
from tests.service.builders import Clock, Queue, WorkerThread, expected_tokens


def trim(queue: Queue) -> None:
    queue.connection.delete(*queue.keys.all_ranks)
    for stream in queue.keys.all_ingress:
        queue.connection.xtrim(stream, maxlen=0, approximate=False)


def delete(queue: Queue) -> None:
    queue.connection.delete(*queue.keys.all_ranks, *queue.keys.all_ingress)


@pytest.mark.parametrize("lose", [trim, delete])
def test_requests_whose_entries_are_gone_are_served_all_the_same(queue: Queue, lose):
    prompts = [(number, 6) for number in range(1, 6)]
    ids = [queue.submit(prompt, max_tokens=4) for prompt in prompts]
    lose(queue)
    with WorkerThread(queue.settings()) as worker:
        for request_id, prompt in zip(ids, prompts, strict=True):
            output = queue.result(request_id)
            assert output.token_ids == expected_tokens(prompt, max_tokens=4)
    # It counts after Redis has put them back, and they may end before.
    restored = worker.metric("quire_requests_restored_total", queue=queue.name, lost="entry")
    assert restored == len(ids)


@pytest.fixture
def metrics(queue: Queue) -> Metrics:
    return Metrics(model="fake", queue=queue.name)


@pytest.fixture
def keeper(queue: Queue, clock: Clock, metrics: Metrics) -> Housekeeper:
    """One that has been heard for longer than a lease."""
    vitals = Vitals(stall_timeout_seconds=60.0, clock=clock)
    contact = Contact(vitals, metrics, silence_seconds=10.0, clock=clock)
    keeper = Housekeeper(
        {0: queue.broker}, worker="keeper", load=lambda _: {}, on_drain=lambda: None, vitals=vitals,
        contact=contact, metrics=metrics, lease_seconds=10.0, clock=clock,
    )  # fmt: skip
    assert keeper.tidy()
    clock.now += 10.0
    return keeper


def test_all_that_was_lost_is_put_back_at_once(queue: Queue, keeper: Housekeeper, metrics: Metrics):
    names = [f"lost-{number}" for number in range(2 * OPEN_PER_TURN + 1)]
    for name in names:
        queue.submit(id=name)
    trim(queue)
    # The keeper has looked at an empty queue, and the rest after that is still going on.
    queue.connection.delete(queue.keys.survey)
    assert keeper.tidy()
    assert sum(queue.broker.queue_depth().values()) == len(names)
    assert metrics.restored[str(Lost.ENTRY)]._value.get() == len(names)
    assert keeper.tidy()
    assert sum(queue.broker.queue_depth().values()) == len(names)


def test_who_may_not_put_back_what_is_lost_does_everything_else(
    queue: Queue, keeper: Housekeeper, metrics: Metrics, monkeypatch
):
    """As a worker does whose user of Redis is from before there was that right."""
    request_id = queue.submit()
    queue.broker.claim(queue.broker.peek(count=1, block_seconds=0.0))
    queue.connection.zadd(queue.keys.lease, {request_id: 1})

    def refuse(**_options):
        raise translated(redis.exceptions.NoPermissionError("this user may not"))

    monkeypatch.setattr(queue.broker, "restore", refuse)
    assert keeper.tidy()
    assert queue.broker.status(request_id).state == "queued"
    assert metrics.redis_errors["restore", "access"]._value.get() == 1
