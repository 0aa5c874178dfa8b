"""The status of a claimed request tells what it does in its worker, step by step."""

from collections import Counter

from quire.queue.publish.commit import CommitItem, CommitReply, CommitStatus
from quire.queue.view.inspection import inspect_shards
from quire.records import Activity
from service.worker.outgoing.completions import Origin
from service.worker.outgoing.delivery import Delivery
from tests.service.builders import (
    Queue,
    StepGate,
    WorkerThread,
    eventually,
    expected_tokens,
)

WAITING, PREFILLING = Activity.WAITING, Activity.PREFILLING
DECODING, PREEMPTED = Activity.DECODING, Activity.PREEMPTED


def activity_of(queue: Queue, request_id: str) -> Activity | None:
    return queue.broker.status(request_id).activity


def test_of_more_requests_than_slots_only_those_in_slots_are_told_to_compute(queue: Queue):
    gate = StepGate(steps=0)
    ids = [queue.submit((n, n), max_tokens=200) for n in range(1, 9)]

    def counts() -> Counter[tuple[str, Activity | None]]:
        # State and activity are of one read: a worker may claim more between two.
        statuses = [queue.broker.status(request_id) for request_id in ids]
        return Counter((str(status.state), status.activity) for status in statuses)

    settings = queue.settings(max_num_seqs=2, claim_batch=4)
    with WorkerThread(settings, before_run=gate):
        gate.step_until(
            lambda: (now := counts())["running", DECODING] == 2 and now["running", WAITING] > 0
        )
        # What is claimed is more than what computes: the activity tells them apart.
        found = counts()
        assert found["running", DECODING] == 2 and found["running", WAITING] > 0
        assert set(found) <= {("running", DECODING), ("running", WAITING), ("queued", None)}
        gate.open()
        for n, request_id in enumerate(ids, start=1):
            assert queue.result(request_id).token_ids == expected_tokens((n, n), max_tokens=200)
            assert activity_of(queue, request_id) is None


def test_a_long_prompt_is_told_to_be_prefilling_until_its_first_token(queue: Queue):
    gate = StepGate(steps=1)
    settings = queue.settings(max_num_batched_tokens=64)
    request_id = queue.submit(tuple(range(1, 201)), max_tokens=600)
    with WorkerThread(settings, before_run=gate):
        eventually(lambda: activity_of(queue, request_id) is PREFILLING)
        assert queue.broker.status(request_id).published == 0
        gate.step_until(lambda: activity_of(queue, request_id) is DECODING)
        # The word comes with the first token, in one commit.
        assert queue.broker.status(request_id).published > 0
        gate.open()
        queue.result(request_id)


def test_a_preempted_request_is_told_to_be_preempted_until_it_runs_again(queue: Queue):
    gate = StepGate(steps=0)
    # Long enough to be seen in the middle, however late the word comes.
    low = queue.submit((7, 7), max_tokens=900, priority="low")
    settings = queue.settings(max_num_seqs=1)
    with WorkerThread(settings, before_run=gate):
        gate.step_until(lambda: activity_of(queue, low) is DECODING)
        urgent = queue.submit((8, 8), max_tokens=400, priority="critical")
        gate.step_until(lambda: activity_of(queue, low) is PREEMPTED)
        assert activity_of(queue, urgent) is DECODING
        queue.broker.cancel(urgent)
        gate.step_until(lambda: activity_of(queue, low) in (PREFILLING, DECODING))
        gate.open()
        assert queue.result(low).token_ids == expected_tokens((7, 7), max_tokens=900)


def test_what_is_told_costs_an_entry_only_when_it_changes(queue: Queue, monkeypatch):
    told: list[Activity | None] = []
    item = Delivery.item

    def counted(self: Delivery) -> CommitItem | None:
        made = item(self)
        if made is not None:
            told.append(made.activity)
        return made

    monkeypatch.setattr(Delivery, "item", counted)
    gate = StepGate(steps=0)
    request_id = queue.submit((1, 2, 3), max_tokens=30)
    with WorkerThread(queue.settings(), before_run=gate):
        for number in range(1, 7):
            gate.allow(1)
            queue.wait_for_tokens(request_id, number)
        gate.open()
        queue.result(request_id)
    # One item had the first token and the word; no other item has a word.
    assert told[0] is DECODING and set(told[1:]) == {None}
    assert len(told) >= 7


def test_the_registry_counts_what_the_claims_of_each_shard_do(queue: Queue):
    gate = StepGate(steps=0)
    for n in range(1, 5):
        queue.submit((n, n), max_tokens=300)

    def counts() -> dict[Activity, int]:
        (state,) = inspect_shards(queue.connection, [queue.broker.keys])
        return state.activities

    settings = queue.settings(max_num_seqs=2, claim_batch=4)
    with WorkerThread(settings, before_run=gate):
        gate.step_until(lambda: counts()[DECODING] == 2 and counts()[WAITING] > 0)
        assert counts()[PREFILLING] == counts()[PREEMPTED] == 0
        gate.open()


def test_an_activity_that_redis_has_lost_is_told_again(queue: Queue):
    request_id = queue.submit((1, 2), max_tokens=4)
    entries = queue.broker.peek(count=1, block_seconds=0.0)
    (claimed,) = queue.broker.claim(entries)
    delivery = Delivery("k", claimed.claim, Origin(request_id=request_id, model="m"))
    delivery.append([5], "a")
    delivery.activity = DECODING
    item = delivery.item()
    assert item is not None and item.activity is DECODING
    delivery.note_told(item, CommitReply(CommitStatus.OK, 1, cancel_requested=False))
    delivery.published = 1
    assert not delivery.has_news and delivery.item() is None
    delivery.note_told(item, CommitReply(CommitStatus.REWIND, 0, cancel_requested=False))
    assert delivery.has_news
