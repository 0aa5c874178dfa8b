"""`quire drain`: asks, waits, and says how each worker ended."""

import json
import re
import threading

import pytest

from quire.cli import main

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(60)]


@pytest.fixture
def drain(real_server, real_broker, monkeypatch, capsys):
    """Runs `quire drain` on the queue of this test; returns exit code and outcomes by worker."""
    monkeypatch.setenv("QUIRE_REDIS_URL", real_server.url)
    monkeypatch.setenv("QUIRE_QUEUE", real_broker.keys.queue)

    def run(*arguments):
        code = main(["drain", "--json", *arguments])
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return code, {row["worker"]: row["outcome"] for row in rows}

    return run


class Signing:
    """A worker that only signs the registry: it drains when told to, and then ends as `end`."""

    def __init__(self, broker, name, *, end="stopped"):
        self._broker, self._name, self._end = broker, name, end
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live)

    def __enter__(self):
        self._broker.beat_worker(self._name, "ready", {"claims": 2})
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _live(self):
        while not self._broker.beat_worker(self._name, "ready", {"claims": 2}):
            if self._over.wait(0.01):
                return
        self._broker.beat_worker(self._name, "draining", {"claims": 1})
        self._broker.beat_worker(self._name, self._end, {})


def test_a_worker_that_drains_is_waited_for(drain, real_broker):
    with Signing(real_broker, "a"), Signing(real_broker, "b"):
        assert drain("a") == (0, {"a": "stopped"})
        (still,) = [info for info in real_broker.workers() if info.name == "b"]
        assert still.state == "ready"


def test_a_name_of_several_workers_is_said_to_be_that(drain, real_broker, capsys):
    real_broker.beat_worker("a", "ready", {"twins": 1})
    assert main(["drain", "a", "--no-wait"]) == 0
    assert "a is the name of several workers" in capsys.readouterr().err


def test_all_is_every_worker_that_lives(drain, real_broker, real_connection):
    real_broker.beat_worker("gone", "stopped", {})
    silent = b"%d ready \x80" % (real_broker.now_ms() - 90_000)
    real_connection.hset(real_broker.keys.workers, "dead", silent)
    with Signing(real_broker, "a"), Signing(real_broker, "b"):
        assert drain("--all") == (0, {"a": "stopped", "b": "stopped"})
    assert drain("--all") == (0, {})


def test_one_that_fails_or_comes_again_is_told_apart(drain, real_broker):
    with Signing(real_broker, "a", end="failed"), Signing(real_broker, "b", end="loading"):
        assert drain("a", "b") == (3, {"a": "failed", "b": "restarted"})


def test_nobody_is_waited_for_who_is_unknown_silent_or_gone(drain, real_broker, real_connection):
    real_broker.beat_worker("gone", "stopped", {})
    real_broker.beat_worker("any", "ready", {})
    assert drain("nobody") == (1, {"nobody": "unknown"})
    silent = b"%d ready \x80" % (real_broker.now_ms() - 90_000)
    real_connection.hset(real_broker.keys.workers, "dead", silent)
    assert drain("dead", "gone") == (3, {"dead": "silent", "gone": "stopped"})
    assert real_broker.control().drain_wishes == frozenset()


def test_the_names_that_there_are_follow_one_that_nobody_has(drain, real_broker, capsys):
    assert main(["drain", "worker-1"]) == 1
    assert "no worker has the name worker-1; none is alive\n" in capsys.readouterr().err
    real_broker.beat_worker("host-1", "ready", {})
    assert main(["drain", "worker-1"]) == 1
    assert "no worker has the name worker-1; there are host-1\n" in capsys.readouterr().err


def test_the_wish_stands_when_nobody_waits_any_longer(drain, real_broker):
    real_broker.beat_worker("a", "ready", {})
    real_broker.beat_worker("b", "ready", {})
    assert drain("a", "--timeout", "0") == (1, {"a": "timeout"})
    assert drain("b", "--no-wait") == (0, {"b": "asked"})
    assert real_broker.control().drain_wishes == {"a", "b"}
    assert real_broker.beat_worker("a", "ready", {}) is True


def test_the_help_names_everything_that_can_become_of_a_worker(drain, capsys):
    with pytest.raises(SystemExit):
        main(["drain", "--help"])
    text = capsys.readouterr().out.partition("with its outcome:")[2].partition("Exit codes")[0]
    told = {"asked", "failed", "restarted", "silent", "stopped", "timeout", "unknown"}
    assert told <= set(re.findall(r"\w+", text))


def test_nobody_and_everybody_at_once_is_a_wrong_command_line(drain):
    assert drain() == (2, {})
    assert drain("a", "--all") == (2, {})
