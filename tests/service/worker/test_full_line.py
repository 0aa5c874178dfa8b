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


def take_tickets(queue: Queue, priority: Priority) -> None:
    """Have all tickets of a class delivered to a reader that uses none of them."""
    stream = queue.keys.ingress(priority)
    while queue.connection.xreadgroup(GROUP, "gone", {stream: ">"}, count=100):
        pass


def test_an_urgent_request_passes_a_full_line_without_a_ticket(queue: Queue):
    gate = StepGate(steps=0)
    with busy(queue, gate):
        # What is paused is claimed by nobody.
        queue.broker.pause("a test")
        urgent = queue.submit((7, 7), max_tokens=3, priority="critical")
        take_tickets(queue, Priority.CRITICAL)
        queue.broker.resume()
        queue.wait_for_state(urgent, "running")
        assert waiting_bulk(queue) == NUM_BULK - NUM_SLOTS - LINE
        gate.step_until(lambda: queue.broker.status(urgent).state.is_terminal)
        assert queue.result(urgent).token_ids == expected_tokens((7, 7), max_tokens=3)


def test_each_better_class_has_room_in_the_line(queue: Queue):
    with busy(queue, StepGate(steps=0), lease_seconds=600.0):
        for level in ("normal", "high", "critical"):
            queue.wait_for_state(queue.submit((8, 8), max_tokens=3, priority=level), "running")


def test_a_request_that_ranks_behind_the_line_waits_in_the_queue(queue: Queue):
    with busy(queue, StepGate(steps=0), policy="fcfs"):
        late = queue.submit((8, 8), max_tokens=3, priority="critical")
        stays(lambda: queue.broker.status(late).state == "queued")


def test_the_smallest_of_many_requests_is_the_next_to_run(queue: Queue):
    """One slot, a full line, and 30 larger requests in the queue before it."""
    gate = StepGate(steps=0)
    many = [queue.submit((n, 9), max_tokens=5 + n) for n in range(1, 31)]
    settings = queue.settings(
        policy="sjf",
        aging_seconds=86_400.0,
        max_num_seqs=1,
        drain_seconds=0.0,
        lease_seconds=60.0,
    )
    with WorkerThread(settings, before_run=gate) as worker:
        running = {"model": "fake", "state": "running"}
        gate.step_until(lambda: worker.metric("quire_engine_requests", **running) == 1)
        eventually(lambda: sum(queue.broker.queue_depth().values()) == 30 - 1 - 16)
        smallest = queue.submit((9, 9), max_tokens=3)
        queue.wait_for_state(smallest, "running")
        # Intake ends with one before it claims another: so the engine has the first of the two.
        queue.wait_for_state(queue.submit((9, 8), max_tokens=2), "running")
        gate.open()
        assert [queue.result(one).completion.attempts for one in many] == [1] * 30
        field = "finished_ms"
        ends = [int(queue.connection.hget(queue.keys.request(one), field)) for one in many]
        end = int(queue.connection.hget(queue.keys.request(smallest), field))
        # The one that was running, and none of the others.
        assert sum(other < end for other in ends) <= 1


@pytest.mark.parametrize("level", ["normal", "high", "critical"])
def test_bulk_gives_way_to_every_better_class_however_long_it_has_run(queue: Queue, level: str):
    gate = StepGate(steps=0)
    with busy(queue, gate, aging_seconds=0.001):
        urgent = queue.submit((7, 7), max_tokens=3, priority=level)
        gate.step_until(lambda: queue.broker.status(urgent).state.is_terminal)
        assert queue.result(urgent).token_ids == expected_tokens((7, 7), max_tokens=3)
