"""What Ctrl-C leaves behind: what goes on is named by commands that work, and a load is no load."""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.console import flags_of
from quire.cli.sources import without_password
from quire.wire.output import State
from tests.quire.waiting import blocked
from tests.service.builders import eventually

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.real_redis, pytest.mark.processes]


@pytest.fixture
def start(real_server):
    """Starts a command line as a process; its queue stands in its flags."""
    started = []

    def run(*arguments):
        command = [sys.executable, "-m", "quire.cli", *arguments]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
        environment["QUIRE_REDIS_URL"] = real_server.url
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def interrupted(process):
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    return out, err


def test_an_interrupted_bench_takes_its_load_back(start, real_broker):
    process = start("bench", "--queue", real_broker.keys.queue, "--num-prompts", "300")
    eventually(lambda: real_broker.queue_depth()[1] == 300, "all are queued")
    _, err = interrupted(process)
    # On a slow machine, lines before it say that no worker is alive.
    assert err.splitlines()[-1] == "error: 300 requests that had not ended were cancelled"
    assert real_broker.backlog().tokens == 0


def test_what_bench_gives_up_waiting_for_is_cancelled(start, real_broker):
    process = start(
        *("bench", "--queue", real_broker.keys.queue, "--num-prompts", "3", "--timeout", "0.2")
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "3 requests that had not ended were cancelled" in err
    assert real_broker.backlog().tokens == 0


@pytest.mark.parametrize(("flag", "verb"), [("--follow", "tail"), ("--wait", "result")])
def test_each_request_that_goes_on_is_named_by_a_command_that_works(
    start, quire, monkeypatch, real_broker, real_connection, flag, verb
):
    queue = real_broker.keys.queue
    monkeypatch.delenv("QUIRE_QUEUE")
    # A reader of an earlier test may be blocked for some seconds yet.
    before = blocked(real_connection)
    process = start("submit", "1+1=", "2+2=", "3+3=", flag, "--queue", queue)
    eventually(lambda: blocked(real_connection) - before, "it waits for the first")
    _, err = interrupted(process)
    commands = [shlex.split(line) for line in re.findall(r"the rest: quire (.*)", err)]
    assert [command[0] for command in commands] == [verb, "result", "result"]
    for command in commands:
        assert real_broker.cancel(command[1]) is State.CANCELLED
        _, _, told = quire(*command)
        assert f"{command[1]}: cancelled" in told


def test_no_password_is_shown_and_no_flag_that_nobody_needs(monkeypatch):
    monkeypatch.setenv("QUIRE_QUEUE", "q")
    monkeypatch.delenv("QUIRE_REDIS_URL", raising=False)
    url = "redis://me:hush@host:1/0"
    arguments = argparse.Namespace(redis_url=url, queue="q", shards=1)
    assert flags_of(arguments) == " --redis-url redis://me@host:1/0"
    assert without_password("redis://:hush@host:1/0") == "redis://host:1/0"
    assert without_password("redis://host:1/0") == "redis://host:1/0"


def test_a_url_that_the_environment_tells_with_its_password_needs_no_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "redis://me:hush@host:1/0"
    monkeypatch.setenv("QUIRE_REDIS_URL", url)
    assert flags_of(argparse.Namespace(redis_url=url, queue="default", shards=1)) == ""


def test_a_password_among_the_options_of_a_url_is_not_shown() -> None:
    url = "redis://host:1/0?password=hush&db=1&ssl_password=hush"
    assert without_password(url) == "redis://host:1/0?db=1"
