"""What a dead worker has left: it is taken over, and begins alone, lest others die beside it."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from engine.batch import Batch
from engine.request import Priority
from quire.queue.broker import Broker
from quire.queue.claim.claim import Claiming
from quire.queue.publish.commit import CommitReply, CommitStatus
from quire.queue.roles import WorkerSide
from service.worker.incoming.trials import Trials
from service.worker.outgoing.completions import own_failure
from service.worker.outgoing.delivery import Delivery
from service.worker.outgoing.outbox import Outbox
from tests.service.builders import (
    PATIENCE_SECONDS,
    SHORT_LEASE_SECONDS,
    Queue,
    StepGate,
    WorkerThread,
    expected_tokens,
    stays,
)
from tests.service.worker.outgoing.test_delivery import make_delivery
from tests.service.worker.outgoing.test_outbox import output, take_item


def make_suspect(key: str = "a", *, priority: Priority = Priority.NORMAL) -> Delivery:
    """A second attempt that has published nothing."""
    delivery = make_delivery(key, priority=priority)
    delivery.origin = replace(delivery.origin, attempts=2, trial_tokens=1)
    return delivery


def begun(trials: Trials, batch: Sequence[int], first: Priority = Priority.NORMAL) -> int:
    """How many of a batch may begin; none of them is opened."""
    with trials.beginning(batch, first=first) as count:
        return count


def test_a_request_is_on_trial_until_it_has_published_something_or_has_ended():
    outbox, delivery = Outbox(), make_suspect()
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

    outbox.open(make_suspect("ended"))
    assert outbox.has_trial(Priority.LOW)
    outbox.end("ended", partial(own_failure, error=ValueError("no")))
    assert not outbox.has_trial(Priority.LOW)


#: The trial tokens of a batch in the order of its claims, and how many of them may begin: while
#: nothing is on trial, and while something is.
BATCHES: tuple[tuple[list[int], int, int], ...] = (
    ([0, 0, 0], 3, 3),
    ([0, 0, 1], 2, 2),
    ([0, 64, 0], 1, 1),
    ([1, 0, 0], 1, 0),
    ([64, 1], 1, 0),
    ([1], 1, 0),
)


@pytest.mark.parametrize(("batch", "alone", "beside_another"), BATCHES)
def test_a_batch_begins_up_to_its_first_suspect_which_begins_alone(
    batch: list[int], alone: int, beside_another: int
):
    outbox = Outbox()
    trials = Trials(outbox)
    assert begun(trials, batch) == alone
    outbox.open(make_suspect())
    assert begun(trials, batch) == beside_another


def test_a_suspect_waits_for_one_like_it_or_better_and_not_for_a_worse_one():
    outbox = Outbox()
    outbox.open(make_suspect(priority=Priority.NORMAL))
    counts = [begun(Trials(outbox), [1, 0], level) for level in Priority]
    assert counts == [0, 0, 1, 1]


def test_after_a_batch_with_a_suspect_requests_are_claimed_one_at_a_time():
    trials = Trials(Outbox())
    assert trials.limit(8) == 8
    assert begun(trials, [0, 1]) == 1
    assert [trials.limit(room) for room in (8, 1, 0, -3)] == [1, 1, 0, -3]
    assert begun(trials, [0]) == 1
    assert trials.limit(8) == 8


def test_what_is_no_more_urgent_than_a_suspect_is_not_claimed_beside_it():
    outbox = Outbox()
    trials = Trials(outbox)
    outbox.open(make_delivery("first attempt"))
    assert [trials.forbid(least) for least in Priority] == [False] * 4
    outbox.open(make_suspect(priority=Priority.HIGH))
    assert [trials.forbid(least) for least in Priority] == [True, True, True, False]


def test_two_intakes_do_not_begin_a_suspect_each():
    outbox, counts = Outbox(), []
    first, second = Trials(outbox), Trials(outbox)
    other = threading.Thread(target=lambda: counts.append(begun(second, [1])))
    with first.beginning([1], first=Priority.NORMAL) as count:
        assert count == 1
        other.start()
        stays(lambda: counts == [])
        outbox.open(make_suspect())
    other.join(PATIENCE_SECONDS)
    assert counts == [0]


def test_an_error_while_a_suspect_is_opened_keeps_no_other_from_beginning():
    outbox = Outbox()
    trials = Trials(outbox)
    with (
        pytest.raises(ValueError, match="unexpected"),
        trials.beginning([1], first=Priority.NORMAL),
    ):
        raise ValueError("unexpected")
    assert not outbox.trials.locked()
    assert begun(Trials(outbox), [1]) == 1


def left_by_a_dead_worker(queue: Queue, number: int, *, priority: str = "normal") -> list[str]:
    """Requests that a worker had claimed, and of which it had published nothing."""
    ids = [queue.submit((n, 9), max_tokens=6, priority=priority) for n in range(1, 1 + number)]
    queue.broker.claim(queue.broker.peek(count=number, block_seconds=0.0))
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

    with WorkerThread(queue.settings(lease_seconds=60.0), before_run=note):
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
    with WorkerThread(queue.settings(lease_seconds=60.0), before_run=gate):
        gate.wait_for_arrival()
        equal = queue.submit((2, 9), max_tokens=3)
        urgent = queue.submit((3, 9), max_tokens=3, priority="high")
        queue.wait_for_state(urgent, "running")
        stays(lambda: queue.broker.status(equal).state == "queued")
        gate.open()
        assert queue.result(suspect).completion.attempts == 2
        assert queue.result(equal).completion.attempts == 1
        queue.result(urgent)


def test_an_urgent_one_that_may_kill_its_worker_does_not_wait_for_bulk_that_may(queue: Queue):
    (bulk,) = left_by_a_dead_worker(queue, 1, priority="low")
    gate = StepGate(steps=0)
    with WorkerThread(queue.settings(lease_seconds=60.0), before_run=gate):
        gate.wait_for_arrival()
        urgent = queue.submit((2, 9), max_tokens=3, priority="critical")
        queue.wait_for_state(urgent, "running")
        queue.take_away(urgent)
        queue.wait_for_state(urgent, "running")
        stays(lambda: queue.broker.status(urgent).state == "running")
        gate.open()
        assert queue.result(urgent).completion.attempts == 2
        assert queue.result(bulk).completion.attempts == 2


def test_a_burst_takes_over_what_a_dead_worker_has_left(queue: Queue):
    request_id = queue.submit((4, 9), max_tokens=6)
    queue.broker.claim(queue.broker.peek(count=1, block_seconds=0.0))
    queue.connection.zadd(queue.keys.lease, {request_id: 1})
    assert queue.broker.num_expired_leases() == 1
    with WorkerThread(queue.settings(burst=True)) as worker:
        assert worker.wait() == 0
    assert queue.broker.num_expired_leases() == 0
    assert queue.broker.status(request_id).state == "completed"


def test_a_burst_takes_over_what_is_queued_again_right_after_its_last_look(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
):
    request_id = queue.submit((4, 9), max_tokens=6)
    queue.broker.claim(queue.broker.peek(count=1, block_seconds=0.0))
    queue.connection.zadd(queue.keys.lease, {request_id: 1})
    peek = Claiming.peek

    def look_and_look_away(self, **options):
        found = peek(self, **options)
        queue.broker.reap()
        return found

    monkeypatch.setattr(Claiming, "peek", look_and_look_away)
    with WorkerThread(queue.settings(burst=True)) as worker:
        assert worker.wait() == 0
    assert queue.broker.status(request_id).state == "completed"


@pytest.mark.parametrize("has_claimed", [False, True], ids=["delivered", "claimed"])
def test_a_burst_takes_over_what_a_worker_has_left_that_died_a_moment_ago(
    queue: Queue, has_claimed: bool
):
    """As a job that is begun again right after it was killed: nobody else may ever come."""
    request_id = queue.submit((4, 9), max_tokens=6)
    broker = Broker(queue.connection, queue=queue.name, lease_seconds=SHORT_LEASE_SECONDS)
    entries = broker.peek(count=1, block_seconds=0.0)
    if has_claimed:
        broker.claim(entries)
    with WorkerThread(queue.settings(burst=True)) as worker:
        assert worker.wait() == 0
    assert queue.broker.status(request_id).state == "completed"
    queue.assert_at_rest()


def test_a_burst_does_not_wait_for_the_end_of_what_a_living_worker_holds(queue: Queue):
    gate = StepGate(steps=2)
    request_id = queue.submit((4, 9), max_tokens=20)
    # The burst waits for a heartbeat of the other, and takes over what has none for a lease.
    with WorkerThread(queue.settings(), before_run=gate):
        queue.wait_for_tokens(request_id, 2)
        with WorkerThread(queue.settings(burst=True)) as worker:
            assert worker.wait() == 0
        assert queue.broker.status(request_id).state == "running"
        gate.open()
        assert queue.result(request_id).completion.attempts == 1


def test_a_burst_does_not_wait_for_ever_for_a_request_that_nobody_can_claim(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
):
    request_id = queue.submit()
    # It would mend the record.
    monkeypatch.setattr(WorkerSide, "rank_anew", lambda _: [])
    for key in (queue.keys.request(request_id), queue.keys.dead):
        queue.connection.set(key, "nothing of ours", ex=60)
    with WorkerThread(queue.settings(burst=True)) as worker:
        assert worker.wait() == 0
    assert sum(queue.broker.queue_depth().values()) == 1
