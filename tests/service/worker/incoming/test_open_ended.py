"""Requests without `max_tokens`: their outputs are as long as queue and context allow."""

import pytest

from quire.queue.control.defaults import QueueDefaults
from tests.service.builders import (
    Queue,
    StepGate,
    WorkerThread,
    expected_tokens,
    left_in_the_middle,
)

PROMPT = (5, 6, 7)
#: Of a worker with a short context, and what a prompt leaves of it.
CONTEXT = {"max_model_len": 96}
LEFT = CONTEXT["max_model_len"] - len(PROMPT)


def ended(queue: Queue, request_id: str, *, num_tokens: int) -> None:
    output = queue.result(request_id)
    assert output.token_ids == expected_tokens(PROMPT, max_tokens=num_tokens)
    assert output.completion.finish_reason == "length"


@pytest.mark.parametrize(("default", "num_tokens"), [(None, LEFT), (30, 30), (5000, LEFT)])
def test_an_output_ends_where_the_queue_or_the_context_does(
    queue: Queue, default: int | None, num_tokens: int
):
    queue.broker.set_defaults(QueueDefaults(max_tokens=default))
    request_id = queue.submit(PROMPT, max_tokens=None)
    with WorkerThread(queue.settings(**CONTEXT)):
        ended(queue, request_id, num_tokens=num_tokens)


def test_a_takeover_ends_it_at_the_same_token_whatever_is_set_meanwhile(queue: Queue):
    queue.broker.set_defaults(QueueDefaults(max_tokens=60))
    request_id = queue.submit(PROMPT, max_tokens=None)
    left_in_the_middle(queue, request_id)
    queue.broker.set_defaults(QueueDefaults(max_tokens=3))
    with WorkerThread(queue.settings()):
        ended(queue, request_id, num_tokens=60)


def test_a_request_that_an_earlier_version_submitted_keeps_the_default_of_then(queue: Queue):
    request_id = queue.submit(PROMPT, max_tokens=None)
    # The scripts of earlier versions write no such field.
    queue.connection.hdel(queue.keys.request(request_id), "answer_limit")
    with WorkerThread(queue.settings()):
        ended(queue, request_id, num_tokens=256)


def test_more_tokens_at_least_than_the_queue_gives_are_refused_by_field(queue: Queue):
    queue.broker.set_defaults(QueueDefaults(max_tokens=30))
    request_id = queue.submit(PROMPT, max_tokens=None, min_tokens=31)
    with WorkerThread(queue.settings()):
        error = queue.result(request_id).completion.error
    assert error is not None and (error.code, error.field) == ("invalid_request", "body.min_tokens")


def test_open_ended_requests_run_beside_each_other_in_a_cache_that_holds_one_context(queue: Queue):
    """Admission promises the blocks of known tokens only, so none waits for room for its most."""
    gate = StepGate(steps=0)
    ids = [queue.submit((*PROMPT, n), max_tokens=None) for n in range(1, 4)]
    blocks = {"num_blocks": CONTEXT["max_model_len"] // 16 + 1, "block_size": 16}
    with WorkerThread(queue.settings(**CONTEXT, **blocks), before_run=gate):
        gate.step_until(lambda: all(queue.published(one) > 2 for one in ids))
        gate.open()
        for n, request_id in enumerate(ids, start=1):
            expected = expected_tokens((*PROMPT, n), max_tokens=LEFT - 1)
            assert queue.result(request_id).token_ids == expected
