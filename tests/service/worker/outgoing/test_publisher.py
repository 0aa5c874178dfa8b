"""The publisher against a Redis that is slow, away, forgetful, or has given the claim to others."""

import contextlib
import socket
import threading
from collections.abc import Sequence
from urllib.parse import urlsplit

import pytest

from quire.transport.connection import connect
from tests.quire.builders import port_of
from tests.quire.proxy import wire_to
from tests.service.builders import (
    Queue,
    StepGate,
    WorkerThread,
    eventually,
    expected_tokens,
    private_redis,
    text_of,
)


@pytest.mark.parametrize(
    "rest",
    # Each commit but the last is followed by the longest rest: none takes less than a thousandth.
    [{"publish_interval_seconds": 0.3}, {"publish_share": 0.001}],
    ids=["an interval", "little time"],
)
def test_a_publisher_that_rests_makes_longer_chunks_of_the_same_tokens(
    queue: Queue, rest: dict[str, float]
):
    request_id = queue.submit((4, 4), max_tokens=400)
    with WorkerThread(queue.settings(**rest)) as worker:
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
            eventually(lambda: worker.metric("quire_publish_backlog_tokens") == 0)
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
    keys = (queue.keys.request(request_id), queue.keys.output(request_id), queue.keys.log_positions)
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


def test_a_worker_sends_again_what_a_replica_that_lagged_had_not_got_when_it_took_over():
    """Its claim is there, and the first of its tokens; the other ones went with the master."""
    gate, options = StepGate(steps=0), ("--repl-diskless-sync-delay", "0")
    with contextlib.ExitStack() as stack:
        master, replica = (stack.enter_context(private_redis(*options)) for _ in range(2))
        wire, heir = stack.enter_context(wire_to(master.url)), connect(replica.url)
        heir.execute_command("REPLICAOF", "127.0.0.1", port_of(master))
        eventually(lambda: heir.info("replication")["master_link_status"] == "up")
        queue = Queue.at(wire.url)
        request_id = queue.submit((4, 4, 4), max_tokens=40)
        # The heir gets no heartbeat before it leads: the claim outlasts that.
        settings = queue.settings(lease_seconds=60.0)
        worker = stack.enter_context(WorkerThread(settings, before_run=gate))

        def step_to(numbers: range) -> None:
            for number in numbers:
                gate.allow(1)
                queue.wait_for_tokens(request_id, number)

        # One step at a time: a step too many would be sent to the heir before it was looked at.
        step_to(range(1, 4))
        assert queue.connection.wait(1, 30_000) == 1
        heir.execute_command("REPLICAOF", "NO", "ONE")
        step_to(range(4, 10))
        wire.lead_to(replica.url)
        master.kill()
        eventually(lambda: 3 <= queue.published(request_id) < 9)
        gate.open()
        output = queue.result(request_id)
        assert worker.metric("quire_publish_rewinds_total") >= 1
    assert output.token_ids == expected_tokens((4, 4, 4), max_tokens=40)
    assert (output.completion.attempts, output.completion.resumes) == (1, 0)


def test_a_claim_lost_to_another_worker_is_dropped_in_silence(queue: Queue):
    gate = StepGate(steps=4)
    request_id = queue.submit((8, 2), max_tokens=60)
    # Its heartbeat would find out, too; with such a lease the commit is the first to.
    with WorkerThread(queue.settings(lease_seconds=600.0), before_run=gate) as loser:
        queue.wait_for_tokens(request_id, 4)
        # Draining, it takes nothing in, not even the very same request.
        loser.worker.stop()
        eventually(lambda: loser.get("/readyz")[0] == 503)
        # A read that was under way would still claim the request, and give it back as a resume.
        eventually(lambda: all(thread.name != "intake-0" for thread in threading.enumerate()))
        queue.take_away(request_id)
        with WorkerThread(queue.settings()):
            output = queue.result(request_id)
        gate.open()
        assert loser.wait() == 0
        lost = {"model": "fake", "outcome": "lost"}
        assert loser.metric("quire_requests_finished_total", **lost) == 1
        assert loser.metric("quire_publish_fenced_total") == 1
    assert output.token_ids == expected_tokens((8, 2), max_tokens=60)
    assert output.completion.resumes == 1
    assert queue.result(request_id) == output
    queue.assert_at_rest()


def test_a_full_redis_makes_longer_chunks_and_the_stream_goes_on_when_there_is_room_again():
    gate = StepGate(steps=5)
    with private_redis("--maxmemory-policy", "noeviction") as server:
        queue = Queue.at(server.url)
        request_id = queue.submit((2, 4), max_tokens=200)
        settings = queue.settings()
        with WorkerThread(settings, before_run=gate) as worker:
            queue.wait_for_tokens(request_id, 4)
            queue.connection.config_set("maxmemory", 1)
            full = {"op": "commit", "kind": "memory"}
            gate.allow(100)
            eventually(lambda: worker.metric("quire_redis_errors_total", **full) >= 3)
            made = {"model": "fake"}
            eventually(lambda: worker.metric("quire_generation_tokens_total", **made) >= 104)
            queue.connection.config_set("maxmemory", 0)
            queue.wait_for_tokens(request_id, 104)
            gate.open()
            output = queue.result(request_id)
            assert worker.metric("quire_publish_fenced_total") == 0
    assert output.token_ids == expected_tokens((2, 4), max_tokens=200)
    assert output.text == text_of(output.token_ids)
    assert output.completion.attempts == 1
    assert max(len(chunk.token_ids) for chunk in output.chunks) >= 50


@pytest.mark.parametrize("breakage", ["output", "record"])
def test_a_request_whose_keys_take_no_commit_costs_only_itself(queue: Queue, breakage: str):
    gate = StepGate(steps=0)
    bad = queue.submit((9, 1), max_tokens=200)
    good = queue.submit((9, 2), max_tokens=200)
    with WorkerThread(queue.settings(), before_run=gate) as worker:
        gate.step_until(lambda: min(queue.published(bad), queue.published(good)) >= 2)
        key = queue.keys.output(bad) if breakage == "output" else queue.keys.request(bad)
        # Only a hand from outside does that.
        queue.connection.set(key, "neither a stream nor a hash", ex=60)
        gate.open()
        assert queue.result(good).token_ids == expected_tokens((9, 2), max_tokens=200)
        # The heartbeat may be the first to find a broken record, and then it is a claim lost.
        ends = [{"model": "fake", "outcome": outcome} for outcome in ("error", "lost")]
        count = "quire_requests_finished_total"
        eventually(lambda: sum(worker.metric(count, **end) for end in ends) == 1)
        later = queue.submit((9, 3), max_tokens=5)
        assert queue.result(later).token_ids == expected_tokens((9, 3), max_tokens=5)
        assert worker.get("/livez")[0] == 200


def test_readers_that_stop_reading_or_vanish_change_no_output(queue: Queue):
    """Real sockets: each has asked for everything and takes nothing of it."""
    gate = StepGate(steps=0)
    ids = [queue.submit((n, 9), max_tokens=300) for n in (1, 2)]
    with WorkerThread(queue.settings(lease_seconds=60.0), before_run=gate):
        gate.step_until(lambda: all(queue.published(request_id) >= 2 for request_id in ids))
        readers = [deaf_reader(queue, ids) for _ in range(8)]
        gate.allow(100)
        for request_id in ids:
            queue.wait_for_tokens(request_id, 90)
        for reader in readers[::2]:
            reader.close()
        gate.open()
        outputs = [queue.result(request_id) for request_id in ids]
        for reader in readers[1::2]:
            reader.close()
    for n, output in zip((1, 2), outputs, strict=True):
        assert output.token_ids == expected_tokens((n, 9), max_tokens=300)
        assert output.text == text_of(output.token_ids)
        assert output.completion.attempts == 1


def deaf_reader(queue: Queue, ids: Sequence[str]) -> socket.socket:
    """A connection that asks for all logs again and again, and never reads an answer."""
    place = urlsplit(queue.url)
    assert place.hostname is not None
    reader = socket.create_connection((place.hostname, place.port or 6379), timeout=5.0)
    names = " ".join(queue.keys.output(request_id) for request_id in ids)
    zeros = " ".join("0" for _ in ids)
    reader.sendall(f"XREAD COUNT 1024 STREAMS {names} {zeros}\r\n".encode() * 500)
    return reader
