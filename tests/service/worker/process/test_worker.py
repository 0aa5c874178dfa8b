"""A whole worker on a real Redis: what callers get, whatever happens around their requests."""

import fakeredis
import pytest

from engine.batch import Batch
from engine.errors import ModelRefused
from quire.client.client import Client
from quire.errors import Cancelled
from service.worker.outgoing.completions import MAX_MESSAGE_LENGTH
from tests.service.builders import (
    BOS_ID,
    Queue,
    StepGate,
    WorkerThread,
    eventually,
    expected_tokens,
    make_settings,
    stays,
    text_of,
)


def test_a_request_is_answered_with_its_tokens_text_and_one_completion_as_often_as_asked(
    queue: Queue,
):
    request_id = queue.submit((10, 20, 30), max_tokens=12, metadata={"row": 7})
    with WorkerThread(queue.settings()):
        output = queue.result(request_id)
    assert output.token_ids == expected_tokens((10, 20, 30), max_tokens=12)
    assert output.text == text_of(output.token_ids)
    assert output.completion.finish_reason == "length"
    assert output.completion.usage.prompt_tokens == 3
    assert output.completion.metadata == {"row": 7}
    assert output.completion.model == "fake"
    assert queue.result(request_id) == output
    queue.assert_at_rest()


def test_many_requests_at_once_are_answered_as_if_each_were_alone(queue: Queue):
    prompts = [(1 + n, 2, 3 + n % 5) for n in range(60)]
    ids = [queue.submit(prompt, max_tokens=5 + n % 7) for n, prompt in enumerate(prompts)]
    gate, settings = StepGate(), queue.settings(max_num_seqs=8, num_blocks=24, claim_batch=4)
    with WorkerThread(settings, before_run=gate):
        outputs = [queue.result(request_id) for request_id in ids]
    assert max(len(batch.rows) for batch in gate.batches) > 1
    for n, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert output.token_ids == expected_tokens(prompt, max_tokens=5 + n % 7)
        assert output.text == text_of(output.token_ids)
    queue.assert_at_rest()


def test_the_same_worker_runs_on_an_in_memory_redis():
    server = fakeredis.FakeServer(version=(7, 0))

    def connect(_url: str, *, block_seconds: float) -> fakeredis.FakeRedis:
        return fakeredis.FakeRedis(server=server, socket_timeout=block_seconds + 3.0)

    queue = Queue(connect("", block_seconds=1.0))
    ids = [queue.submit((n, n), max_tokens=6) for n in (1, 2, 3)]
    settings = make_settings("redis://unused", queue.name)
    with WorkerThread(settings, connect=connect):
        outputs = [queue.result(request_id) for request_id in ids]
    assert [o.token_ids for o in outputs] == [
        expected_tokens((n, n), max_tokens=6) for n in (1, 2, 3)
    ]


def test_text_prompts_and_chats_are_tokenized_by_the_model(queue: Queue):
    gate = StepGate()
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    with (
        WorkerThread(queue.settings(), before_run=gate),
        Client(queue.url, queue=queue.name) as client,
    ):
        sampling = {"max_tokens": 1}
        client.submit("ab", sampling=sampling).result(timeout=60)
        chat = [{"role": "user", "content": parts}]
        client.submit(messages=chat, sampling=sampling).result(timeout=60)
    prompts = [row.prompt_token_ids for batch in gate.batches for row in batch.rows]
    assert [text_of(prompt) for prompt in prompts] == ["ab", "user:hi\n"]
    # A plain prompt gets the special tokens of the tokenizer; a template writes its own.
    assert [prompt[0] == BOS_ID for prompt in prompts] == [True, False]


def test_a_request_without_a_seed_gets_the_same_one_wherever_it_runs(queue: Queue):
    same_id = "the-same-request"
    tokens = []
    for _ in range(2):
        other = Queue.at(queue.url)
        other.submit((5, 6), seed=None, id=same_id)
        with WorkerThread(other.settings()):
            tokens.append(other.result(same_id).token_ids)
    assert tokens[0] == tokens[1]
    assert tokens[0] != expected_tokens((5, 6), max_tokens=8, seed=0)


def test_a_stop_token_ends_a_generation_as_completed(queue: Queue):
    tokens = expected_tokens((9, 9), max_tokens=20)
    request_id = queue.submit((9, 9), max_tokens=20, stop_token_ids=[tokens[6]])
    with WorkerThread(queue.settings()):
        output = queue.result(request_id)
    assert output.completion.finish_reason == "stop"
    assert output.token_ids == tokens[: tokens.index(tokens[6]) + 1]


# -- cancel ---------------------------------------------------------------------------------------


def test_cancelling_a_running_request_ends_it_with_what_it_has(queue: Queue):
    gate = StepGate(steps=3)
    request_id = queue.submit(max_tokens=500)
    # With such a lease no heartbeat brings the word; a commit does.
    with WorkerThread(queue.settings(lease_seconds=600.0), before_run=gate) as worker:
        queue.wait_for_tokens(request_id, 3)
        assert queue.broker.cancel(request_id) == "running"
        gate.step_until(lambda: queue.broker.status(request_id).state.is_terminal)
        output = queue.result(request_id)
        assert output.completion.state == "cancelled"
        assert output.completion.error is not None
        assert output.completion.error.code == "cancelled"
        assert (
            output.token_ids == expected_tokens((1, 2, 3), max_tokens=500)[: len(output.token_ids)]
        )
        assert 3 <= len(output.token_ids) < 500
        worker.wait_for_end("cancelled")
    queue.assert_at_rest()


def test_text_held_back_for_a_stop_string_comes_with_the_end_of_a_cancelled_request(queue: Queue):
    gate = StepGate(steps=6)
    request_id = queue.submit((10, 10), max_tokens=900, stop=["never in the text" * 3])
    with WorkerThread(queue.settings(), before_run=gate):
        client = Client(queue.connection, queue=queue.name)
        queue.wait_for_tokens(request_id, 5)
        client.cancel(request_id)
        gate.step_until(lambda: client.status(request_id).state.is_terminal)
    with pytest.raises(Cancelled) as ended:
        client.result(request_id)
    completion = ended.value.completion
    assert completion.tail
    assert completion.text == text_of(completion.token_ids)


def test_cancelling_a_claimed_request_that_still_waits_ends_it_without_a_token(queue: Queue):
    gate = StepGate(steps=0)
    settings = queue.settings(max_num_seqs=1)
    first = queue.submit(max_tokens=1000)
    with WorkerThread(settings, before_run=gate):
        gate.wait_for_arrival()
        second = queue.submit(max_tokens=4)
        queue.wait_for_state(second, "running")
        queue.broker.cancel(second)
        # It has no commit that could bring the flag; the heartbeat does.
        gate.step_until(lambda: queue.broker.status(second).state.is_terminal)
        assert queue.result(second).completion.state == "cancelled"
        assert queue.result(second).token_ids == ()
        gate.open()
        assert queue.result(first).completion.state == "completed"


# -- priority -------------------------------------------------------------------------------------


def test_an_urgent_request_passes_a_line_full_of_bulk(queue: Queue):
    gate = StepGate(steps=0)
    settings = queue.settings(max_num_seqs=2, claim_batch=2)
    bulk = [queue.submit((n,), max_tokens=200, priority="low") for n in range(1, 9)]

    def num_of(*states: str) -> int:
        return sum(str(queue.broker.status(id_).state) in states for id_ in bulk)

    with WorkerThread(settings, before_run=gate):
        # Until two run, however far apart they came, and two more wait in front of the engine.
        gate.step_until(lambda: num_of("running") == 4)
        urgent = queue.submit((99,), max_tokens=3, priority="critical")
        queue.wait_for_state(urgent, "running")
        # Intake ends with one before it claims another: so the engine has the first of the two.
        queue.wait_for_state(queue.submit((98,), max_tokens=3, priority="critical"), "running")
        num_ended = num_of("completed")
        gate.allow(8)
        assert queue.result(urgent).token_ids == expected_tokens((99,), max_tokens=3)
        assert num_of("completed") == num_ended
        gate.open()
        for n, request_id in enumerate(bulk, start=1):
            assert queue.result(request_id).token_ids == expected_tokens((n,), max_tokens=200)


def test_a_fresh_urgent_request_is_not_outranked_by_the_age_of_a_backlog(queue: Queue):
    """Bulk that waited in Redis for an hour gains one class at most."""
    an_hour_ago = queue.broker.now_ms() - 3_600_000
    bulk = [queue.submit((n, 5), max_tokens=30, priority="low") for n in range(1, 4)]
    for request_id in bulk:
        record = queue.broker.keys.request(request_id)
        queue.connection.hset(record, "submitted_ms", an_hour_ago)
    gate = StepGate(steps=0)
    with WorkerThread(queue.settings(max_num_seqs=1), before_run=gate):
        gate.wait_for_arrival()
        urgent = queue.submit((9, 9), max_tokens=3, priority="critical")
        queue.wait_for_state(urgent, "running")
        # Intake ends with one before it claims another: so the engine has the first of the two.
        queue.wait_for_state(queue.submit((9, 8), max_tokens=3, priority="critical"), "running")
        gate.step_until(lambda: queue.published(urgent) > 0)
        assert sum(queue.published(request_id) >= 30 for request_id in bulk) <= 1
        gate.open()
        for request_id in bulk:
            queue.result(request_id)


def test_what_the_engine_cannot_admit_stays_in_redis_for_other_workers(queue: Queue):
    gate = StepGate(steps=0)
    settings = queue.settings(max_num_seqs=2, claim_batch=3)
    ids = [queue.submit((n,), max_tokens=200) for n in range(1, 9)]
    with WorkerThread(settings, before_run=gate) as worker:
        running = {"model": "fake", "state": "running"}
        gate.step_until(lambda: worker.metric("quire_engine_requests", **running) == 2)
        eventually(lambda: sum(queue.broker.queue_depth().values()) == 8 - (2 + 3))
        stays(lambda: sum(queue.broker.queue_depth().values()) == 8 - (2 + 3))
        gate.open()
        assert all(queue.result(id_).completion.state == "completed" for id_ in ids)


# -- the end of a worker --------------------------------------------------------------------------


def test_a_burst_ends_with_0_when_the_queue_is_empty_and_all_is_done(queue: Queue):
    ids = [queue.submit((n,), max_tokens=10) for n in range(1, 30)]
    worker = WorkerThread(queue.settings(burst=True, max_num_seqs=4))
    with worker:
        assert worker.wait() == 0
    assert all(queue.broker.status(id_).state == "completed" for id_ in ids)
    queue.assert_at_rest()


def test_a_drain_finishes_what_is_running_and_leaves_the_rest_in_the_queue(queue: Queue):
    gate = StepGate(steps=2)
    settings = queue.settings(max_num_seqs=1, claim_batch=1)
    first = queue.submit((1,), max_tokens=6)
    with WorkerThread(settings, before_run=gate) as worker:
        queue.wait_for_tokens(first, 2)
        worker.worker.stop()
        eventually(lambda: worker.get("/readyz")[0] == 503)
        # It is unready a moment before its intake is told.
        (intake,) = worker.worker._intakes.values()
        eventually(intake._stopping.is_set)
        late = queue.submit((2,), max_tokens=6)
        gate.open()
        assert worker.wait() == 0
    assert queue.result(first).token_ids == expected_tokens((1,), max_tokens=6)
    assert queue.broker.status(late).state == "queued"


def test_requests_released_by_a_drain_are_continued_to_the_very_same_tokens(queue: Queue):
    """As `left_in_the_middle` has it, with what the worker counts."""
    gate = StepGate(steps=0)
    ids = [queue.submit((n, n), max_tokens=100) for n in (1, 2, 3)]
    with WorkerThread(queue.settings(drain_seconds=0.0), before_run=gate) as worker:
        gate.step_until(lambda: all(queue.published(request_id) >= 5 for request_id in ids))
        worker.worker.stop()
        gate.step_to_end_of(worker)
        assert worker.wait() == 0
        released = {"model": "fake", "outcome": "released"}
        assert worker.metric("quire_requests_finished_total", **released) == 3
    for request_id in ids:
        status = queue.broker.status(request_id)
        assert (status.state, status.attempts) == ("queued", 0)
        assert status.published >= 5
    with WorkerThread(queue.settings()) as second:
        outputs = [queue.result(request_id) for request_id in ids]
        resumed = {"model": "fake", "fingerprint": "same"}
        assert second.metric("quire_requests_resumed_total", **resumed) == 3
    for n, output in zip((1, 2, 3), outputs, strict=True):
        assert output.token_ids == expected_tokens((n, n), max_tokens=100)
        assert output.text == text_of(output.token_ids)
        assert output.completion.attempts == 1
        assert output.completion.resumes == 1
        assert not output.completion.resumed_fingerprint_changed
    queue.assert_at_rest()


def test_asked_twice_to_stop_a_worker_releases_at_once(queue: Queue):
    gate = StepGate(steps=4)
    request_id = queue.submit(max_tokens=300)
    with WorkerThread(queue.settings(drain_seconds=3600.0), before_run=gate) as worker:
        queue.wait_for_tokens(request_id, 2)
        worker.worker.stop()
        worker.worker.stop()
        gate.step_to_end_of(worker)
        assert worker.wait() == 0
    assert queue.broker.status(request_id).state == "queued"


def test_an_operator_drains_a_worker_by_its_name(queue: Queue):
    gate = StepGate(steps=2)
    request_id = queue.submit((6, 6), max_tokens=12)
    settings = queue.settings()
    with WorkerThread(settings, before_run=gate) as worker:
        queue.wait_for_tokens(request_id, 1)
        with WorkerThread(queue.settings(lease_seconds=60.0)) as other:
            queue.broker.drain(settings.worker)
            eventually(lambda: state_of(queue, settings.worker) == "draining")
            assert queue.broker.control().drain_wishes == frozenset()
            # Unlike a second signal, a second wish does not hurry it.
            queue.broker.drain(settings.worker)
            eventually(lambda: queue.broker.control().drain_wishes == frozenset())
            gate.open()
            assert worker.wait() == 0
            assert not other.has_ended
            output = queue.result(request_id)
    assert output.token_ids == expected_tokens((6, 6), max_tokens=12)
    assert output.completion.resumes == 0
    assert state_of(queue, settings.worker) == "stopped"


def state_of(queue: Queue, worker: str) -> str | None:
    return next((info.state for info in queue.broker.workers() if info.name == worker), None)


def test_cancels_still_work_while_draining(queue: Queue):
    gate = StepGate(steps=2)
    request_id = queue.submit(max_tokens=800)
    with WorkerThread(queue.settings(), before_run=gate) as worker:
        queue.wait_for_tokens(request_id, 2)
        worker.worker.stop()
        queue.broker.cancel(request_id)
        # Opened, it might be through before the next commit brings the word.
        gate.step_until(lambda: worker.has_ended)
        assert worker.wait() == 0
    assert queue.result(request_id).completion.state == "cancelled"


def test_a_request_that_fails_alone_costs_only_itself(queue: Queue):
    bad, good = queue.submit((7, 7), max_tokens=9), queue.submit((8, 8), max_tokens=9)

    def fail_for_the_bad_one(batch: Batch) -> None:
        if any(list(row.prompt_token_ids) == [7, 7] for row in batch.rows):
            raise ValueError("cannot compute 7, " * 100)

    with WorkerThread(queue.settings(), before_run=fail_for_the_bad_one):
        failed, completed = queue.result(bad), queue.result(good)
        assert queue.result(queue.submit(max_tokens=3)).completion.state == "completed"
    assert failed.completion.state == "failed"
    assert failed.completion.error is not None
    assert failed.completion.error.code == "engine_error"
    assert "cannot compute 7" in failed.completion.error.message
    assert len(failed.completion.error.message) == MAX_MESSAGE_LENGTH
    assert completed.token_ids == expected_tokens((8, 8), max_tokens=9)


@pytest.mark.parametrize(
    ("error", "code"), [(ModelRefused("this folder holds no model"), 2), (KeyError("weight"), 1)]
)
def test_a_worker_that_cannot_load_its_model_exits_with_2_if_it_knows_why(
    queue: Queue, error: Exception, code: int
):
    def refuse(_settings):
        raise error

    with WorkerThread(queue.settings(), load=refuse) as worker:
        assert worker.wait() == code


@pytest.mark.parametrize("part", ["publisher", "intake-0", "heartbeat", "keeper"])
def test_no_worker_lives_on_with_a_dead_thread(queue: Queue, part: str):
    gate = StepGate(steps=2)
    request_id = queue.submit(max_tokens=100)
    with WorkerThread(queue.settings(), before_run=gate) as worker:
        queue.wait_for_tokens(request_id, 1)
        worker.kill_thread(part)
        gate.open()
        assert worker.wait() == 1
