"""What a dead worker has left: it is taken over, and begins alone, lest others die beside it."""

from dataclasses import replace
from functools import partial

from engine.batch import Batch
from engine.request import Priority
from quire.transitions import CommitReply, CommitStatus
from service.completions import own_failure
from service.outbox import Outbox
from tests.service.builders import Queue, StepGate, WorkerThread, expected_tokens, stays
from tests.service.test_outbox import make_delivery, output, take_item


def test_a_request_is_on_trial_until_it_has_published_something_or_has_ended():
    outbox, delivery = Outbox(), make_delivery()
    delivery.origin = replace(delivery.origin, attempts=2)
    assert not outbox.has_trial(Priority.LOW)
    outbox.open(delivery)
    outbox.open(make_delivery("first attempt"))
    assert [outbox.has_trial(least) for least in Priority] == [True, True, False, False]
    outbox.put([output(0, [7])])
    # It is known to nobody else yet: a worker that dies now leaves it as it was.
    assert outbox.has_trial(Priority.LOW)
    outbox.settle(
        "a", take_item(outbox), reply=CommitReply(CommitStatus.OK, 1, cancel_requested=False)
    )
    assert not outbox.has_trial(Priority.LOW)

    ended = make_delivery("ended")
    ended.origin = replace(ended.origin, attempts=2)
    outbox.open(ended)
    assert outbox.has_trial(Priority.LOW)
    outbox.end("ended", partial(own_failure, error=ValueError("no")))
    assert not outbox.has_trial(Priority.LOW)


def left_by_a_dead_worker(queue: Queue, number: int) -> list[str]:
    """Requests that a worker had claimed, and of which it had published nothing."""
    ids = [queue.submit((n, 9), max_tokens=6) for n in range(1, 1 + number)]
    queue.broker.claim(queue.broker.read_ingress("dead", count=number, block_seconds=0.0))
    for request_id in ids:
        queue.take_away(request_id)
        assert queue.broker.status(request_id).attempts == 1
    return ids


def test_what_its_last_worker_may_have_died_of_begins_alone(queue: Queue):
    ids = left_by_a_dead_worker(queue, 4)
    fresh = queue.submit((5, 9), max_tokens=6)
    batches: list[set[int]] = []

    def note(batch: Batch) -> None:
        batches.append({row.prompt_token_ids[0] for row in batch.rows})

    with WorkerThread(queue.settings(), before_run=note):
        outputs = [queue.result(request_id) for request_id in (*ids, fresh)]
    for n, answer in enumerate(outputs, start=1):
        assert answer.token_ids == expected_tokens((n, 9), max_tokens=6)
        assert answer.completion.attempts == (1 if n == 5 else 2)
    begun = [next(step for step, batch in enumerate(batches) if n in batch) for n in range(1, 6)]
    assert len(set(begun[:4])) == 4
    queue.assert_at_rest()


def test_beside_one_that_may_kill_it_a_worker_begins_only_what_is_more_urgent(queue: Queue):
    (suspect,) = left_by_a_dead_worker(queue, 1)
    gate = StepGate(steps=0)
    with WorkerThread(queue.settings(), before_run=gate):
        gate.wait_for_arrival()
        equal = queue.submit((2, 9), max_tokens=3)
        urgent = queue.submit((3, 9), max_tokens=3, priority="high")
        queue.wait_for_state(urgent, "running")
        stays(lambda: queue.broker.status(equal).state == "queued")
        gate.open()
        assert queue.result(suspect).completion.attempts == 2
        assert queue.result(equal).completion.attempts == 1
        queue.result(urgent)


def test_a_burst_takes_over_what_a_dead_worker_has_left(queue: Queue):
    request_id = queue.submit((4, 9), max_tokens=6)
    queue.broker.claim(queue.broker.read_ingress("dead", count=1, block_seconds=0.0))
    queue.connection.zadd(queue.keys.lease, {request_id: 1})
    assert queue.broker.num_expired_leases() == 1
    with WorkerThread(queue.settings(burst=True)) as worker:
        assert worker.wait() == 0
    assert queue.broker.num_expired_leases() == 0
    assert queue.broker.status(request_id).state == "completed"
