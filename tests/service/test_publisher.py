"""The publisher against a Redis that is slow, away, forgetful, or has given the claim to others."""

import contextlib
from collections.abc import Iterator

import pytest

from quire.local_redis import LocalRedis
from tests.service.builders import (
    Queue,
    StepGate,
    WorkerThread,
    eventually,
    expected_tokens,
    text_of,
)


def test_a_slow_publisher_makes_longer_chunks_of_the_same_tokens(queue: Queue):
    request_id = queue.submit((4, 4), max_tokens=400)
    with WorkerThread(queue.settings(publish_interval_seconds=0.05)) as worker:
        output = queue.result(request_id)
    commits = worker.metric("quire_publish_seconds_count")
    assert output.token_ids == expected_tokens((4, 4), max_tokens=400)
    assert output.text == text_of(output.token_ids)
    assert len(output.chunks) <= commits < 100
    assert max(len(chunk.token_ids) for chunk in output.chunks) > 4


def test_every_chunk_says_which_text_came_with_which_token(queue: Queue):
    request_id = queue.submit((4, 4), max_tokens=100)
    with WorkerThread(queue.settings(publish_interval_seconds=0.02)):
        output = queue.result(request_id)
    for chunk in output.chunks:
        assert len(chunk.text_ends) == len(chunk.token_ids)
        assert chunk.text_ends[-1] == len(chunk.text)


@contextlib.contextmanager
def private_redis() -> Iterator[LocalRedis]:
    """A server the test may stop; its log on disk survives a kill."""
    with LocalRedis.start(append_only=True, options=("--appendfsync", "always")) as server:
        if server.kind in ("url", "fake"):
            pytest.skip(
                "the test ends a server of its own, and there is only a borrowed or fake one"
            )
        yield server


def test_while_redis_is_away_the_engine_goes_on_and_nothing_is_lost():
    gate = StepGate(steps=5)
    with private_redis() as server:
        queue = Queue.at(server.url)
        request_id = queue.submit((2, 3), max_tokens=300)
        settings = queue.settings(lease_seconds=30.0)
        with WorkerThread(settings, before_run=gate) as worker:
            queue.wait_for_tokens(request_id, 4)
            server.kill()
            gate.open()
            # The device is not stalled by a dead Redis: all tokens are made before it comes back.
            made = {"model": "fake"}
            eventually(lambda: worker.metric("quire_generation_tokens_total", **made) == 300)
            assert worker.get("/livez")[0] == 200
            errors = {"op": "commit", "kind": "connection"}
            eventually(lambda: worker.metric("quire_redis_errors_total", **errors) >= 1)
            server.restart()
            output = queue.result(request_id)
            eventually(lambda: worker.metric("quire_publish_backlog_entries") == 0)
    assert output.token_ids == expected_tokens((2, 3), max_tokens=300)
    assert output.text == text_of(output.token_ids)
    assert output.completion.attempts == 1


def test_a_worker_that_cannot_reach_redis_at_its_end_gives_up_and_says_so():
    gate = StepGate(steps=5)
    with private_redis() as server:
        queue = Queue.at(server.url)
        request_id = queue.submit((2, 3), max_tokens=300)
        with WorkerThread(
            queue.settings(drain_seconds=0.0, flush_seconds=0.2), before_run=gate
        ) as worker:
            queue.wait_for_tokens(request_id, 4)
            server.kill()
            worker.worker.stop()
            gate.step_until(lambda: worker.has_ended)
            assert worker.wait() == 1


def test_tokens_that_redis_lost_are_sent_again(queue: Queue):
    gate = StepGate(steps=6)
    request_id = queue.submit((8, 1), max_tokens=50)
    keys = (queue.keys.request(request_id), queue.keys.output(request_id))
    with WorkerThread(queue.settings(), before_run=gate) as worker:
        queue.wait_for_tokens(request_id, 6)
        backup = {key: queue.connection.dump(key) for key in keys}
        gate.allow(6)
        queue.wait_for_tokens(request_id, 12)
        # A failover to a replica that had not got the last commits.
        for key, value in backup.items():
            queue.connection.restore(key, 3_600_000, value, replace=True)
        assert queue.published(request_id) == 6
        gate.open()
        output = queue.result(request_id)
        assert worker.metric("quire_publish_rewinds_total") == 1
    assert output.token_ids == expected_tokens((8, 1), max_tokens=50)
    assert output.text == text_of(output.token_ids)


def test_a_claim_lost_to_another_worker_is_dropped_in_silence(queue: Queue):
    gate = StepGate(steps=4)
    request_id = queue.submit((8, 2), max_tokens=60)
    with WorkerThread(queue.settings(), before_run=gate) as loser:
        queue.wait_for_tokens(request_id, 4)
        # Draining, it takes nothing in, not even the very same request.
        loser.worker.stop()
        eventually(lambda: loser.get("/readyz")[0] == 503)
        # What the reaper does to a lease that ran out.
        queue.connection.zadd(queue.keys.lease, {request_id: 1})
        with WorkerThread(queue.settings()):
            output = queue.result(request_id)
        gate.open()
        assert loser.wait() == 0
        lost = {"model": "fake", "outcome": "lost"}
        assert loser.metric("quire_requests_finished_total", **lost) == 1
    assert output.token_ids == expected_tokens((8, 2), max_tokens=60)
    assert output.completion.attempts == 2
    assert queue.result(request_id) == output
    queue.assert_at_rest()
