"""`quire models`: which workers announce which model, on which queue."""

import json

import pytest

from quire.cli.exit_codes import EXIT_ERROR, EXIT_OK, EXIT_USAGE
from quire.queue.broker import Broker


@pytest.fixture
def other(real_broker):
    """Another queue of the same server."""
    other = Broker(real_broker.connection, queue=f"{real_broker.keys.queue}-b")
    yield other
    for key in real_broker.connection.scan_iter(match=f"{other.keys.prefix}:*"):
        real_broker.connection.delete(key)


@pytest.fixture
def served(real_broker, other):
    real_broker.beat_worker("w1", "ready", {}, model="small", adapters={"sql": "1"})
    real_broker.beat_worker("w2", "ready", {}, model="small")
    real_broker.beat_worker("w3", "stopped", {}, model="gone")
    other.beat_worker("w4", "ready", {"embeddings": 1.0}, model="vectors")
    return real_broker.keys.queue, other.keys.queue


def records(out):
    return [json.loads(line) for line in out.splitlines()]


def test_each_model_of_the_named_queues_has_its_workers(quire, served):
    first, second = served
    code, out, _ = quire("models", first, second, "--json")
    small, vectors = records(out)
    assert code == EXIT_OK
    assert small == {
        "queue": first, "model": "small", "kind": "text", "adapters": ["sql"],
        "workers": ["w1", "w2"],
    }  # fmt: skip
    assert (vectors["queue"], vectors["model"]) == (second, "vectors")
    assert (vectors["kind"], vectors["workers"]) == ("embeddings", ["w4"])


def test_all_finds_queues_that_nobody_names(quire, served):
    _, only_own, _ = quire("models", "--json")
    _, every, _ = quire("models", "--all", "--json")
    assert {one["queue"] for one in records(only_own)} == {served[0]}
    assert set(served) <= {one["queue"] for one in records(every)}


def test_a_queue_without_a_live_worker_is_a_failure(quire, real_broker):
    real_broker.beat_worker("w3", "stopped", {}, model="gone")
    code, out, err = quire("models")
    assert (code, out) == (EXIT_ERROR, "")
    assert "no live worker" in err


def test_a_name_that_no_queue_can_have_is_wrong_usage(quire):
    assert quire("models", "a b")[0] == EXIT_USAGE
