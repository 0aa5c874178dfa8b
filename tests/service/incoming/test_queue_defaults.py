"""A worker follows the deadline that the queue has set for a request without one."""

from quire.transitions.defaults import QueueDefaults
from tests.service.builders import Queue, StepGate, WorkerThread, eventually, expected_tokens

#: Enough for the first tokens on a busy machine.
TIMEOUT_SECONDS = 3.0


def test_a_worker_ends_a_request_at_the_deadline_of_the_queue(queue: Queue):
    queue.broker.set_defaults(QueueDefaults(request_timeout_seconds=TIMEOUT_SECONDS))
    gate = StepGate(steps=4)
    with WorkerThread(queue.settings(), before_run=gate) as worker:
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
