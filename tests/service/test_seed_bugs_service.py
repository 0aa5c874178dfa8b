"""Regression tests for the bugs of the reference systems that a worker could have, by their ids."""

from quire.client.client import Client
from quire.transport.connection import connect
from tests.service.builders import Queue, StepGate, WorkerThread, eventually, expected_tokens


def test_b33_a_result_can_be_read_more_than_once_and_expires_by_itself(queue: Queue):
    request_id = queue.submit((5, 6), max_tokens=4)
    with WorkerThread(queue.settings()):
        first = queue.result(request_id)
    assert queue.result(request_id).token_ids == first.token_ids
    keys = queue.broker.keys
    lifetimes = [queue.connection.pttl(key(request_id)) for key in (keys.request, keys.output)]
    assert all(lifetime > 0 for lifetime in lifetimes)


def test_b34_latency_and_throughput_metrics_are_measured_on_a_known_run(queue: Queue):
    ids = [queue.submit((n, n), max_tokens=5) for n in range(1, 4)]
    with WorkerThread(queue.settings()) as worker:
        for request_id in ids:
            queue.result(request_id)
        eventually(
            lambda: (
                worker.metric("quire_request_e2e_seconds_count", model="fake", priority="normal")
                == 3
            )
        )
        # The engine counts a step after its outputs are on their way.
        eventually(lambda: worker.metric("quire_generation_tokens_total", model="fake") == 15)
        assert worker.metric("quire_time_to_first_token_seconds_sum", model="fake") > 0


def test_b37_one_request_s_error_does_not_end_the_loop(queue: Queue):
    def fail_for_one(batch) -> None:
        if any(13 in row.prompt_token_ids for row in batch.rows):
            raise ValueError("the thirteenth")

    bad = queue.submit((13, 13), max_tokens=5)
    good = queue.submit((7, 7), max_tokens=5)
    with WorkerThread(queue.settings(), before_run=fail_for_one):
        assert queue.result(bad).completion.finish_reason == "error"
        assert queue.result(good).token_ids == expected_tokens((7, 7), max_tokens=5)
        later = queue.submit((8, 8), max_tokens=5)
        assert queue.result(later).token_ids == expected_tokens((8, 8), max_tokens=5)


def test_b63_and_b66_a_reader_that_is_slow_or_gone_never_changes_an_output(queue: Queue):
    gate = StepGate(steps=5)
    slow = queue.submit((3, 1), max_tokens=60)
    other = queue.submit((4, 1), max_tokens=60)
    with WorkerThread(queue.settings(), before_run=gate), connect(queue.url) as connection:
        client = Client(connection, queue=queue.name)
        seen = next(client.stream(slow)).end
        gate.open()
        # The reader asks for nothing more, and both generations run to their ends.
        assert queue.result(other).token_ids == expected_tokens((4, 1), max_tokens=60)
        assert queue.result(slow).token_ids == expected_tokens((3, 1), max_tokens=60)
        rest = [token for chunk in client.stream(slow, after=seen) for token in chunk.token_ids]
        assert tuple(rest) == expected_tokens((3, 1), max_tokens=60)[seen:]


def test_b66_requests_run_side_by_side(queue: Queue):
    gate = StepGate(steps=0)
    ids = [queue.submit((n, 2), max_tokens=200) for n in range(1, 9)]
    with WorkerThread(queue.settings(), before_run=gate):
        gate.step_until(lambda: any(len(batch.rows) > 1 for batch in gate.batches))
        gate.open()
        for request_id in ids:
            queue.result(request_id)
