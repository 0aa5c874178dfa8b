"""`quire serve` with real processes: it answers, outlives its workers, and loses nothing."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from quire.transport.local_redis import server_program
from tests.examples.pages import REDIS, blocks, command, commands, process
from tests.service.builders import CHECKOUT, PATIENCE_SECONDS, Queue, eventually
from tests.service.fake_model import expected_tokens

pytestmark = [pytest.mark.real_redis, pytest.mark.processes, pytest.mark.timeout(240)]

#: The same command with a worker that has no model, and needs 20 ms for each token.
FAKE = (
    "from quire.cli import main\n"
    "from quire.cli.serve import plan\n"
    "plan.WORKER = 'tests.service.fake_worker'\n"
    "main()"
)
NUM_TOKENS = 300


class Serve:
    """The command as a process, and the lines that it has printed."""

    def __init__(self, folder: Path, *flags: str, is_fake: bool = False) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
        environ |= {"OMP_NUM_THREADS": "1", "QUIRE_TEST_STEP_SECONDS": "0.02"}
        program = ["-c", f"import sys; {FAKE}"] if is_fake else ["-m", "quire.cli"]
        ports = ("--port", "0", "--console-port", "0", "--redis-port", "0")
        self.process = subprocess.Popen(
            [sys.executable, *program, "serve", *flags, "--data", str(folder), *ports],
            cwd=CHECKOUT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def line(self, pattern: str, *, number: int = 1) -> re.Match[str]:
        """The line of the output that fits, or the second that does, once it is there."""

        def found() -> re.Match[str] | None:
            fits = [one for line in list(self.lines) if (one := re.match(pattern, line))]
            assert fits[number - 1 :] or self.process.poll() is None, "\n".join(self.lines)
            return fits[number - 1] if len(fits) >= number else None

        one = eventually(found, pattern, seconds=4 * PATIENCE_SECONDS)
        assert one is not None
        return one

    @property
    def redis_url(self) -> str:
        return self.line(r"  Redis +(\S+)")[1]

    def worker(self, *, number: int = 1) -> int:
        """The process of a worker: the one that is ready first, second, ..."""
        return int(self.line(r"worker-1, process (\d+), is ready", number=number)[1])

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait(self) -> int:
        code = self.process.wait(4 * PATIENCE_SECONDS)
        self._reader.join()
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))


@contextlib.contextmanager
def serving(folder: Path, *flags: str, is_fake: bool = False) -> Iterator[Serve]:
    if server_program() is None:
        pytest.skip("no real Redis to start")
    serve = Serve(folder, *flags, is_fake=is_fake)
    try:
        yield serve
    finally:
        serve.process.kill()
        serve.wait()


@pytest.fixture(scope="module")
def abacus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with serving(tmp_path_factory.mktemp("abacus")) as serve:
        yield serve
        serve.process.send_signal(signal.SIGINT)
        assert serve.wait() == 0, "\n".join(serve.lines)
        assert serve.lines[-1].startswith("drained")


def answer_of(call: str) -> dict:
    """What the gateway answers to a line that begins with `curl`."""
    words = shlex.split(call)
    assert words[0] == "curl" and words[2::2] == ["-H", "-d"], call
    request = urllib.request.Request(words[1], words[5].encode())
    request.add_header(*words[3].split(": "))
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_the_printed_call_is_answered_and_the_pages_are_there(abacus: Serve):
    answer = answer_of(abacus.line("curl .*")[0])
    assert answer["choices"][0]["message"]["content"] == "46"
    url = abacus.line(r"  console +(\S+)")[1]
    with urllib.request.urlopen(url, timeout=60) as response:
        assert b"default" in response.read()


def test_what_the_readme_shows_can_be_typed_and_prints_what_it_says(abacus: Serve):
    readme = (CHECKOUT / "README.md").read_text()
    # That those of make are targets is a law of all pages, and tests/examples plays the demo.
    shown = [line.split()[0] for line in commands(readme)]
    assert shown == ["make", "make", "quire", "curl", "quire"]
    call = abacus.line("curl .*")[0]
    assert answer_of(call)["choices"][0]["message"]["content"] == "46"
    assert "answered with `46`" in readme
    assert re.sub(r":\d+/", ":10402/", call) == command(readme, "curl ")
    (program,) = blocks(readme, "python")
    assert REDIS in program
    program = program.replace(REDIS, abacus.redis_url)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=CHECKOUT
    )
    assert f"prints `{done.stdout.strip()}`" in readme, done.stderr
    with process(command(readme, "quire worker").replace(REDIS, abacus.redis_url)) as added:
        added.wait_for_event("worker ready")
        queue = Queue.at(abacus.redis_url, name="default")
        assert len(queue.broker.workers()) == 2


def without_numbers(line: str) -> str:
    """A line of the output without what differs from one run to the next."""
    line = line.replace(socket.gethostname(), "host")
    return re.sub(r"\d+(\.\d+)?", "0", re.sub(r"/\S*redis\b|/tmp\S*|\([^)]*\)", "", line))


def test_the_page_shows_what_is_printed(abacus: Serve):
    abacus.line("Ctrl-C")
    page = (CHECKOUT / "docs" / "how-to" / "serve.md").read_text()
    (shown,) = re.findall(r"```\n(Quire serves .*?)\n```", page, re.DOTALL)
    end = abacus.lines.index("Ctrl-C drains and ends") + 1
    # How far it is is told as often as it takes.
    printed = [line for line in abacus.lines[:end] if not line.startswith("loading ")]
    folder = re.search(r"data in (\S+)\)", abacus.line("  Redis .*")[0])
    assert folder is not None
    printed = [line.replace(folder[1], "/home/you/redis") for line in printed]
    assert [*map(without_numbers, printed)] == [*map(without_numbers, shown.splitlines())]


@dataclass(frozen=True)
class Killed:
    """A request whose worker was killed, and then the command itself, in the middle each time."""

    folder: Path
    request_id: str
    #: The workers that had it, how much of it was published when the first was killed, and what
    #: ran on after the command was killed.
    workers: tuple[int, int]
    published: int
    left: list[psutil.Process]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("killed")
    with serving(folder, is_fake=True) as serve:
        queue, first = Queue.at(serve.redis_url, name="default"), serve.worker()
        request_id = queue.submit((1, 2, 3), max_tokens=NUM_TOKENS)
        queue.wait_for_tokens(request_id, 5)
        os.kill(first, signal.SIGKILL)
        second = serve.worker(number=2)
        serve.line("worker-1 was ended by SIGKILL; it is started again as process")
        published = queue.published(request_id)
        queue.take_away(request_id)
        queue.wait_for_tokens(request_id, published + 5)
        programs = serve.processes()
        assert len(programs) == 4
        serve.process.kill()
        _, left = psutil.wait_procs(programs, timeout=PATIENCE_SECONDS)
    return Killed(folder, request_id, (first, second), published, left)


@pytest.fixture(scope="module")
def again(killed: Killed) -> Iterator[Serve]:
    with serving(killed.folder, is_fake=True) as serve:
        yield serve


def test_a_worker_that_is_killed_is_replaced_and_its_request_goes_on(killed: Killed):
    assert killed.workers[0] != killed.workers[1]
    assert 5 <= killed.published < NUM_TOKENS - 5


def test_a_killed_command_leaves_no_program_behind(killed: Killed):
    assert killed.left == []


def test_the_next_start_finishes_the_request_with_every_token(killed: Killed, again: Serve):
    queue = Queue.at(again.redis_url, name="default")
    assert killed.published + 5 <= queue.published(killed.request_id) < NUM_TOKENS
    queue.take_away(killed.request_id)
    found = queue.result(killed.request_id)
    assert found.completion.resumes == 2
    assert found.token_ids == expected_tokens((1, 2, 3), max_tokens=NUM_TOKENS)


def test_a_drain_lets_an_open_answer_end_before_anything_else(again: Serve):
    body = {"model": "abacus", "prompt": [1, 2, 3], "max_tokens": 100, "stream": True}
    url = again.line(r"  OpenAI +(\S+)")[1]
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as response:
        first = response.readline()
        again.process.send_signal(signal.SIGINT)
        lines = [first, *response]
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length" and len(events) > 2
    assert lines[-2:] == [b"data: [DONE]\n", b"\n"]
    again.line("gateway waits for 1 open answer")
    assert again.wait() == 0
