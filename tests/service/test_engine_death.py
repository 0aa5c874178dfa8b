"""An engine or its device dies under its requests: what counts as an attempt, and what does not."""

import pytest
from structlog.testing import capture_logs

from engine.batch import Batch
from engine.errors import DeviceFailed
from quire.queue.lease.lease import BackOff
from tests.service.builders import PATIENCE_SECONDS, Queue, WorkerThread, expected_tokens


@pytest.fixture(autouse=True)
def _is_never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that stands still for seconds still commits, and promotes nothing of its own."""
    monkeypatch.setattr("service.worker.process.worker.LAST_COMMIT_SECONDS", PATIENCE_SECONDS)
    pauses = BackOff(first_seconds=300.0, longest_seconds=300.0)
    monkeypatch.setattr("service.worker.outgoing.publisher.FAILURE_PAUSES", pauses)


@pytest.mark.parametrize("error", [DeviceFailed("device lost"), SystemExit("torch is gone")])
def test_what_an_engine_that_dies_had_begun_goes_on_elsewhere_at_once(
    queue: Queue, error: BaseException
):
    ids = [queue.submit((n,), max_tokens=300) for n in (4, 5)]

    def die(batch: Batch) -> None:
        # The second may come some steps later than the first.
        if all(queue.published(request_id) >= 1 for request_id in ids):
            raise error

    with WorkerThread(queue.settings(lease_seconds=600.0), before_run=die) as worker:
        assert worker.wait() == 1
    for request_id in ids:
        status = queue.broker.status(request_id)
        assert (status.state, status.attempts) == ("queued", 0)
        assert status.published >= 1
    with WorkerThread(queue.settings()):
        outputs = [queue.result(id_) for id_ in ids]
    for n, output in zip((4, 5), outputs, strict=True):
        assert output.token_ids == expected_tokens((n,), max_tokens=300)
        assert output.completion.attempts == 1


def test_many_lost_devices_end_no_request(queue: Queue):
    """Each worker gets one step further and dies; nothing of that is the request's doing."""
    request_id = queue.submit((4, 9), max_tokens=12)
    for _ in range(4):
        steps: list[Batch] = []

        def die(batch: Batch, steps: list[Batch] = steps) -> None:
            steps.append(batch)
            if len(steps) > 1:
                raise DeviceFailed("device lost")

        with WorkerThread(queue.settings(max_attempts=3), before_run=die) as worker:
            assert worker.wait() == 1
    assert queue.broker.status(request_id).state == "queued"
    with WorkerThread(queue.settings(max_attempts=3)):
        output = queue.result(request_id)
    assert output.token_ids == expected_tokens((4, 9), max_tokens=12)


def test_a_request_that_takes_every_device_down_is_given_up_and_the_others_are_served(
    queue: Queue,
):
    def die_of_the_poison(batch: Batch) -> None:
        if any(list(row.prompt_token_ids) == [6, 6] for row in batch.rows):
            raise DeviceFailed("device-side assert")

    poison = queue.submit((6, 6), max_tokens=9)
    waiting = [queue.submit((n, 3), max_tokens=9) for n in (1, 2)]
    settings = {"max_attempts": 2, "max_num_seqs": 1}
    for _ in range(2):
        with WorkerThread(queue.settings(**settings), before_run=die_of_the_poison) as worker:
            assert worker.wait() == 1
        status = queue.broker.status(poison)
        if not status.state.is_terminal:
            # It is tried again, but only after a pause.
            assert (status.state, status.attempts) == ("scheduled", 1)
            due(queue, poison)
    assert queue.result(poison).completion.state == "failed"
    assert [letter.request_id for letter in queue.broker.dead_letters()] == [poison]
    with WorkerThread(queue.settings(**settings), before_run=die_of_the_poison):
        outputs = [queue.result(request_id) for request_id in waiting]
    for n, output in zip((1, 2), outputs, strict=True):
        assert output.token_ids == expected_tokens((n, 3), max_tokens=9)
        assert output.completion.attempts == 1


def due(queue: Queue, request_id: str) -> None:
    """End the pause before the next attempt of a request now."""
    queue.connection.zadd(queue.keys.delay, {request_id: 1})
    assert [item.request_id for item in queue.broker.promote()] == [request_id]


def test_an_engine_that_dies_in_its_last_step_is_heard_of_and_its_work_given_back(queue: Queue):
    steps: list[Batch] = []

    def die_when_asked_to_end(batch: Batch) -> None:
        steps.append(batch)
        if len(steps) > 2:
            assert worker.worker._parts.loop._stopping.wait(PATIENCE_SECONDS)
            raise DeviceFailed("device lost")

    request_id = queue.submit((8, 8), max_tokens=50)
    settings = queue.settings(drain_seconds=0.0, lease_seconds=600.0)
    with WorkerThread(settings, before_run=die_when_asked_to_end) as worker:
        queue.wait_for_tokens(request_id, 1)
        assert worker.stop() == 1
    assert worker.worker.death is not None
    assert worker.worker.death.name == "engine"
    status = queue.broker.status(request_id)
    assert (status.state, status.attempts) == ("queued", 0)


def test_a_thread_that_dies_at_the_very_end_is_heard_of(queue: Queue):
    with capture_logs() as said, WorkerThread(queue.settings()) as worker:
        queue.result(queue.submit((8, 9), max_tokens=2))
        # It signs off when all the others have ended.
        worker.worker._parts.keeper._register = {"ready": True, "draining": True}.__getitem__
        assert worker.stop() == 1
    (line,) = (line for line in said if line["event"] == "worker died")
    assert line["thread"] == "keeper"
