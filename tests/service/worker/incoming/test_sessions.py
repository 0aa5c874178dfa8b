"""A worker leaves a turn to the worker of the last one for a bounded time, and takes the others."""

from tests.service.builders import Queue, WorkerThread, eventually, expected_tokens


def serve_first_turn(queue: Queue, worker: str) -> None:
    """The worker of that name, which only the registry knows, has the first turn of a session."""
    queue.broker.beat_worker(worker, "ready", {})
    queue.submit(id="first", session_id="s", max_tokens=1)
    (claimed,) = queue.broker.claim(queue.broker.peek(count=1), worker=worker)
    queue.broker.cancel("first")
    assert queue.broker.release([claimed.claim]) == [True]


def test_a_turn_that_is_kept_for_another_worker_holds_up_nothing_and_is_taken_in_the_end(
    queue: Queue,
):
    serve_first_turn(queue, "another")
    queue.submit((5, 6), id="turn", session_id="s", max_tokens=3)
    plain = queue.submit((7, 8), max_tokens=3)
    with WorkerThread(queue.settings(session_affinity_seconds=0.3)):
        assert queue.result(plain).token_ids == expected_tokens((7, 8), max_tokens=3)
        assert queue.result("turn").token_ids == expected_tokens((5, 6), max_tokens=3)
    record = queue.connection.hgetall(queue.keys.request("turn"))
    waited_ms = int(record[b"claimed_ms"]) - int(record[b"kept_ms"])
    assert waited_ms >= 300


def test_a_worker_takes_every_turn_at_once_without_affinity(queue: Queue):
    serve_first_turn(queue, "another")
    queue.submit((5, 6), id="turn", session_id="s", max_tokens=3)
    with WorkerThread(queue.settings(session_affinity_seconds=0.0)):
        assert queue.result("turn").token_ids == expected_tokens((5, 6), max_tokens=3)
    assert b"kept_ms" not in queue.connection.hgetall(queue.keys.request("turn"))


def test_a_worker_gets_the_turn_that_is_kept_for_it(queue: Queue):
    settings = queue.settings(worker_name="same")
    with WorkerThread(settings):
        first = queue.submit((1, 2), session_id="s", max_tokens=2)
        second = queue.submit((1, 2, 3), id="second", session_id="s", max_tokens=2)
        assert queue.result(first).token_ids == expected_tokens((1, 2), max_tokens=2)
        assert queue.result(second).token_ids == expected_tokens((1, 2, 3), max_tokens=2)
        eventually(lambda: queue.connection.exists(queue.keys.turns) == 0, "no turn is open")
    (entry,) = queue.connection.hvals(queue.keys.served)
    assert entry == b"default:s same"
