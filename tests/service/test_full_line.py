"""What a worker takes in while its line is full: what is better than the line, and nothing else."""

import contextlib
from collections.abc import Iterator

import pytest

from quire.keys import GROUP
from quire.wire.protocol import Priority
from tests.service.builders import Queue, StepGate, WorkerThread, eventually, expected_tokens, stays

#: Bulk requests in the queue, and how many of them a worker of these tests holds at most.
NUM_BULK, NUM_SLOTS, LINE = 12, 2, 3


@contextlib.contextmanager
def busy(queue: Queue, gate: StepGate, **settings: object) -> Iterator[WorkerThread]:
    """A worker that runs two of the bulk for long, with three more in its line."""
    for n in range(1, 1 + NUM_BULK):
        queue.submit((n, 9), max_tokens=900, priority="low")
    values = {"max_num_seqs": NUM_SLOTS, "claim_batch": LINE, "drain_seconds": 0.0} | settings
    with WorkerThread(queue.settings(**values), before_run=gate) as worker:
        running = {"model": "fake", "state": "running"}
        gate.step_until(lambda: worker.metric("quire_engine_requests", **running) == NUM_SLOTS)
        eventually(lambda: waiting_bulk(queue) == NUM_BULK - NUM_SLOTS - LINE)
        try:
            yield worker
        finally:
            gate.open()


def waiting_bulk(queue: Queue) -> int:
    return queue.broker.queue_depth()[Priority.LOW]


def deliver(queue: Queue, priority: Priority, *, to: str) -> str:
    """Submit a request, and have it delivered to a worker that does not claim it."""
    # What is paused is read by nobody else.
    queue.broker.pause("a test")
    request_id = queue.submit((7, 7), max_tokens=3, priority=priority.name.lower())
    stream = queue.keys.ingress(priority)
    assert queue.connection.xreadgroup(GROUP, to, {stream: ">"}, count=1)
    queue.broker.resume()
    return request_id


def test_bulk_is_not_read_in_the_place_of_an_urgent_request_that_another_worker_has(queue: Queue):
    with busy(queue, StepGate(steps=0), lease_seconds=600.0):
        urgent = deliver(queue, Priority.CRITICAL, to="another")
        stays(lambda: waiting_bulk(queue) == NUM_BULK - NUM_SLOTS - LINE)
        assert queue.broker.status(urgent).state == "queued"


@pytest.mark.parametrize("last", ["dead", "this very one"])
def test_an_urgent_request_that_a_worker_was_given_in_vain_passes_a_full_line(
    queue: Queue, last: str
):
    """The worker died before its claim, or the reply that brought it to this one was lost."""
    gate = StepGate(steps=0)
    with busy(queue, gate, worker_name="this very one"):
        urgent = deliver(queue, Priority.CRITICAL, to=last)
        queue.wait_for_state(urgent, "running")
        assert waiting_bulk(queue) == NUM_BULK - NUM_SLOTS - LINE
        gate.step_until(lambda: queue.broker.status(urgent).state.is_terminal)
        assert queue.result(urgent).token_ids == expected_tokens((7, 7), max_tokens=3)


def test_what_nobody_claims_hides_no_other_class_that_has_room_in_the_line(queue: Queue):
    with busy(queue, StepGate(steps=0), lease_seconds=600.0):
        deliver(queue, Priority.CRITICAL, to="another")
        for level in ("normal", "high"):
            queue.wait_for_state(queue.submit((8, 8), max_tokens=3, priority=level), "running")


@pytest.mark.parametrize("level", ["normal", "high", "critical"])
def test_bulk_gives_way_to_every_better_class_however_long_it_has_run(queue: Queue, level: str):
    gate = StepGate(steps=0)
    with busy(queue, gate, aging_seconds=0.001):
        urgent = queue.submit((7, 7), max_tokens=3, priority=level)
        gate.step_until(lambda: queue.broker.status(urgent).state.is_terminal)
        assert queue.result(urgent).token_ids == expected_tokens((7, 7), max_tokens=3)
