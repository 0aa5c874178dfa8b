"""A request that a worker computes ends at its deadline, or at that of its worker or queue."""

from quire.queue.control.defaults import QueueDefaults
from service.worker.settings.config import Settings
from tests.service.builders import Queue, StepGate, WorkerThread, eventually, expected_tokens

#: Enough for the first tokens on a busy machine.
TIMEOUT_SECONDS = 3


def test_a_deadline_that_passes_while_running_expires_the_request(queue: Queue):
    gate = StepGate(steps=2)
    with WorkerThread(queue.settings(), before_run=gate) as worker:
        eventually(lambda: worker.get("/readyz")[0] == 200)
        deadline_ms = queue.broker.now_ms() + 1000 * TIMEOUT_SECONDS
        request_id = queue.submit(max_tokens=500, deadline_ms=deadline_ms)
        queue.wait_for_tokens(request_id, 2)
        eventually(lambda: queue.broker.now_ms() > deadline_ms)
        gate.open()
        output = queue.result(request_id)
    assert output.completion.state == "expired"
    assert output.completion.finish_reason == "deadline"
    assert output.token_ids == expected_tokens((1, 2, 3), max_tokens=500)[: len(output.token_ids)]


def run_past_timeout(queue: Queue, settings: Settings) -> None:
    """A request is running when TIMEOUT_SECONDS are over, and ends with the tokens it has."""
    gate = StepGate(steps=4)
    with WorkerThread(settings, before_run=gate) as worker:
        eventually(lambda: worker.get("/readyz")[0] == 200)
        request_id = queue.submit((1, 2, 3), max_tokens=500)
        queue.wait_for_tokens(request_id, 3)
        late_ms = queue.broker.now_ms() + 1000 * TIMEOUT_SECONDS
        eventually(lambda: queue.broker.now_ms() > late_ms)
        gate.step_until(lambda: queue.broker.status(request_id).state.is_terminal)
        output = queue.result(request_id)
    assert (output.completion.state, output.completion.finish_reason) == ("expired", "deadline")
    published = len(output.token_ids)
    assert 3 <= published < 500
    assert output.token_ids == expected_tokens((1, 2, 3), max_tokens=500)[:published]


def test_a_request_timeout_ends_what_takes_too_long_and_keeps_its_tokens(queue: Queue):
    run_past_timeout(queue, queue.settings(request_timeout_seconds=TIMEOUT_SECONDS))


def test_a_worker_ends_a_request_at_the_deadline_of_the_queue(queue: Queue):
    queue.broker.set_defaults(QueueDefaults(request_timeout_seconds=TIMEOUT_SECONDS))
    run_past_timeout(queue, queue.settings())


def test_the_earlier_of_timeout_and_deadline_counts(queue: Queue):
    gate = StepGate(steps=2)
    settings = queue.settings(request_timeout_seconds=600.0)
    deadline_ms = queue.broker.now_ms() + 500
    request_id = queue.submit((1, 2, 3), max_tokens=500, deadline_ms=deadline_ms)
    with WorkerThread(settings, before_run=gate):
        gate.step_until(lambda: queue.broker.status(request_id).state.is_terminal)
    assert queue.result(request_id).completion.finish_reason == "deadline"
    assert queue.broker.now_ms() - deadline_ms < 60_000
