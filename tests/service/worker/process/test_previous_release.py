"""Workers and clients of the previous release beside today's on one queue.

The release is the last commit that changed the version of the project, taken out of the history.
Without the history (a shallow clone, an archive) the test is skipped and says so.
"""

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.client.client import Client, Handle
from quire.queue.broker import Broker
from quire.transport.connection import connect
from quire.transport.local_redis import URL_VARIABLE, LocalRedis
from quire.wire.output import Completion, State
from tests.examples.pages import command, page, typed
from tests.service.builders import CHECKOUT
from tests.service.fake_model import eventually, expected_tokens

pytestmark = pytest.mark.timeout(240)

#: Queues of earlier releases are drained before an upgrade, see ADR 0047.
FIRST_RELEASE = (0, 3, 0)
#: Seconds of work, so that a kill meets some in the middle.
NUM_REQUESTS, NUM_TOKENS = 16, 120
PATIENCE_SECONDS = 60.0
#: A client of the release: what it submits, and what it reads.
CLIENT = f"""
import json, sys
import quire
from quire import Client
print(quire.__file__, flush=True)
with Client(sys.argv[1]) as client:
    handles = [
        client.submit(
            prompt=[9, 9, number],
            request_id=f"old-{{number}}",
            sampling={{"max_tokens": {NUM_TOKENS}, "ignore_eos": True, "seed": number}},
        )
        for number in range({NUM_REQUESTS})
    ]
    print("submitted", flush=True)
    for handle in handles:
        tokens = [token for chunk in handle.stream() for token in chunk.token_ids]
        result = handle.result(timeout={PATIENCE_SECONDS})
        print(json.dumps([str(result.state), tokens, list(result.token_ids)]), flush=True)
"""


def git(*arguments: str) -> bytes:
    """What git prints about the checkout; skips the test if it fails."""
    done = subprocess.run(["git", *arguments], cwd=CHECKOUT, capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"no history: {done.stderr.decode().strip()}")
    return done.stdout


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the release, in a folder of their own."""
    if git("rev-parse", "--is-shallow-repository").strip() == b"true":
        pytest.skip("the clone is shallow: its history does not tell the previous release")
    found = git("log", "-1", "--format=%h", "-G^version = ", "--", "pyproject.toml")
    commit = found.decode().strip()
    project = tomllib.loads(git("show", f"{commit}:pyproject.toml").decode())
    version = project["project"]["version"]
    if tuple(map(int, version.split("."))) < FIRST_RELEASE:
        pytest.skip(f"the last release is {version}, whose queues are drained before an upgrade")
    folder = tmp_path_factory.mktemp("release")
    archive = git("archive", commit, "quire", "engine", "service", "tests", "pyproject.toml")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


@pytest.fixture
def redis_url() -> Iterator[str]:
    server = LocalRedis.start()
    if not server.is_real:
        pytest.skip("no redis-server or valkey-server: worker processes need one")
    yield server.url
    server.stop()


class Processes:
    """The processes of a test; all are killed at its end."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self._url = redis_url
        self._folder = folder
        self.all: list[subprocess.Popen[str]] = []

    def worker(self, name: str, checkout: Path) -> subprocess.Popen[str]:
        flags = ["--redis-url", self._url, "--worker-name", name, "--http-port", "0"]
        flags += ["--max-num-seqs", "4", "--claim-batch", "4", "--lease-seconds", "1"]
        flags += ["--drain-seconds", "0", "--log-format", "json"]
        log = self._folder / f"{name}.log"
        return self.start(["-m", "tests.service.fake_worker", *flags], checkout, log)

    def start(self, arguments: list[str], checkout: Path, output: Path) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
        environment |= {"PYTHONPATH": str(checkout), "QUIRE_TEST_STEP_SECONDS": "0.01"}
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=checkout, env=environment, text=True, stdout=file, stderr=file,
            )  # fmt: skip
        self.all.append(process)
        return process


@pytest.fixture
def processes(redis_url: str, tmp_path: Path) -> Iterator[Processes]:
    made = Processes(redis_url, tmp_path)
    yield made
    for process in made.all:
        process.kill()
        process.wait()


def finished(log: Path) -> int:
    """How many requests a worker has ended, by its log."""
    return log.read_text(errors="replace").count('"request finished"')


def test_both_releases_serve_one_queue_and_continue_each_others_requests(
    release, redis_url, processes, tmp_path
):
    here = Path(CHECKOUT)
    output = tmp_path / "client.txt"
    for name, checkout in (("old-1", release), ("new-1", here)):
        processes.worker(name, checkout)
    with connect(redis_url) as connection:
        broker = Broker(connection)
        # Whoever is ready first would end all requests before the other one comes.
        eventually(
            lambda: [info.state for info in broker.workers()] == ["ready"] * 2,
            "both are ready",
            seconds=PATIENCE_SECONDS,
        )
    old_client = processes.start(["-c", CLIENT, redis_url], release, output)
    with Client(redis_url) as client:
        handles = [
            client.submit(
                prompt=[7, 7, number],
                sampling={"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": number},
            )
            for number in range(NUM_REQUESTS)
        ]
        eventually(
            lambda: all(finished(tmp_path / f"{name}.log") for name in ("old-1", "new-1")),
            "both have ended a request",
            seconds=PATIENCE_SECONDS,
        )
        # Today's take over what a killed worker of the release had begun, and the other way round.
        processes.all[0].kill()
        processes.worker("new-2", here)
        processes.worker("old-2", release)
        processes.all[1].send_signal(signal.SIGTERM)
        results = [handle.result(timeout=PATIENCE_SECONDS) for handle in handles]
        old_results = [
            client.result(f"old-{n}", timeout=PATIENCE_SECONDS) for n in range(NUM_REQUESTS)
        ]
    assert old_client.wait(PATIENCE_SECONDS) == 0

    first, *lines = output.read_text().splitlines()
    assert first.startswith(str(release))
    # Its warnings are in the same file, for instance while no worker is ready yet.
    told = [json.loads(line) for line in lines if line.startswith("[")]
    for number in range(NUM_REQUESTS):
        check(results[number], [7, 7, number], seed=number)
        check(old_results[number], [9, 9, number], seed=number)
        wanted = list(expected_tokens([9, 9, number], max_tokens=NUM_TOKENS, seed=number))
        assert told[number] == ["completed", wanted, wanted]
    assert sum(result.resumes for result in (*results, *old_results)) > 0
    # Each kind has ended requests, also of those that began at the other.
    logs = {kind: [*tmp_path.glob(f"{kind}-?.log")] for kind in ("old", "new")}
    for kind, files in logs.items():
        assert sum(map(finished, files)) > 0, kind


def test_an_upgrade_as_the_page_says_loses_nothing(
    release, redis_url, processes, tmp_path, monkeypatch, capsys
):
    text = page("upgrade")
    monkeypatch.setenv(URL_VARIABLE, redis_url)
    old = processes.worker("old-1", release)
    with Client(redis_url) as client, connect(redis_url) as connection:

        def submit(number: int) -> Handle:
            sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": number}
            return client.submit(prompt=[4, 4, number], sampling=sampling)

        def is_ready(name: str) -> bool:
            return (name, "ready") in [
                (one.name, one.state) for one in Broker(connection).workers()
            ]

        handles = [submit(number) for number in range(4)]
        eventually(
            lambda: finished(tmp_path / "old-1.log"), "it ends some", seconds=PATIENCE_SECONDS
        )
        processes.worker("new-1", Path(CHECKOUT))
        eventually(lambda: is_ready("new-1"), "today's is ready", seconds=PATIENCE_SECONDS)
        assert typed(command(text, "quire status")) == 0
        shown = capsys.readouterr().out
        assert "old-1" in shown and "new-1" in shown
        # More than both have room for, so that the old one has some to give back.
        handles += [submit(number) for number in range(4, NUM_REQUESTS)]
        assert typed(command(text, "quire drain").replace("NAME", "old-1")) == 0
        results = [handle.result(timeout=PATIENCE_SECONDS) for handle in handles]
    assert old.wait(PATIENCE_SECONDS) == 0
    for number, result in enumerate(results):
        check(result, [4, 4, number], seed=number)
    assert finished(tmp_path / "new-1.log") > 0


def check(result: Completion, prompt: list[int], *, seed: int) -> None:
    assert result.state is State.COMPLETED
    assert tuple(result.token_ids) == expected_tokens(prompt, max_tokens=NUM_TOKENS, seed=seed)
