"""The pages for services of others: what they show runs against a real worker and gateway."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from quire import Client
from quire.transport.local_redis import URL_VARIABLE, LocalRedis
from service.worker.settings.config import EMBEDDED_MODEL
from tests.examples.pages import GATEWAY, REDIS, blocks, command, page
from tests.service.builders import eventually, http_get
from tests.service.processes import LoggedProcess

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

FASTAPI, HTTP = page("fastapi"), page("http")
PROMPT, ANSWER = "count: 7 to 12=", "7 8 9 10 11 12"


@dataclass(frozen=True)
class Served:
    """Where a queue with a real worker is, and a gateway in front of it."""

    redis: str
    gateway: str


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(URL_VARIABLE, raising=False)
        with LocalRedis.start() as server:
            where = ("--redis-url", server.url)
            model = ("--model", str(EMBEDDED_MODEL), "--device", "cpu")
            with (
                LoggedProcess("service", *where, *model) as worker,
                LoggedProcess("service.gateway", *where) as front,
            ):
                port = front.wait_for_event("gateway ready")["http_port"]
                worker.wait_for_event("worker ready")
                yield Served(server.url, f"http://127.0.0.1:{port}")


def printed(*line: str, **variables: str) -> str:
    environ = os.environ | {"PROMPT": PROMPT} | variables
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_for_node_prints_the_answer(served):
    if shutil.which("node") is None:
        pytest.skip("there is no node on this machine")
    (program,) = blocks(HTTP, "js")
    assert GATEWAY in program
    program = program.replace(GATEWAY, served.gateway)
    assert printed("node", "--input-type=module", "--eval", program) == f"{ANSWER}\n"


def test_the_program_for_go_prints_the_answer_and_repeats_it_under_its_key(served, tmp_path):
    if shutil.which("go") is None:
        pytest.skip("there is no go on this machine")
    (program,) = blocks(HTTP, "go")
    assert GATEWAY in program
    (tmp_path / "main.go").write_text(program.replace(GATEWAY, served.gateway))
    home = {"GOCACHE": str(tmp_path / "cache"), "GOFLAGS": "-mod=mod", "GO111MODULE": "off"}
    printed("go", "build", "-o", str(tmp_path / "ask"), str(tmp_path / "main.go"), **home)
    with Client(served.redis) as client:
        before = len(list(client.ends(timeout=0)))
        for _ in range(2):
            assert printed(str(tmp_path / "ask")) == f"{ANSWER}\n"
        # The second call is the first one.
        assert len(list(client.ends(timeout=0))) == before + 1
        assert printed(str(tmp_path / "ask"), PROMPT="12+34=") == "46\n"


@pytest.fixture
def application(served, tmp_path) -> Iterator[int]:
    """The port of the application of the page, started by its command."""
    pytest.importorskip("fastapi", reason="FastAPI is not installed")
    (program,) = blocks(FASTAPI, "python")
    assert REDIS in program
    (tmp_path / "app.py").write_text(program.replace(REDIS, served.redis))
    line = command(FASTAPI, "uvicorn", "sh").split()
    # A socket of the test, because another process could take a free port before the server does.
    with socket.create_server(("127.0.0.1", 0)) as listening:
        line[line.index("--port") :] = ["--fd", str(listening.fileno())]
        process = subprocess.Popen(
            [sys.executable, "-m", *line],
            cwd=tmp_path,
            pass_fds=[listening.fileno()],
            stderr=subprocess.DEVNULL,
        )
        try:
            yield listening.getsockname()[1]
        finally:
            process.terminate()
            process.wait()


def test_the_application_submits_shows_and_streams_and_knows_what_it_does_not_know(application):
    asked, line = [
        command(FASTAPI, curl, "sh").replace(":8000/", f":{application}/")
        for curl in ("curl -s ", "curl -sN ")
    ]
    (prompt,) = re.findall(r'"prompt": "(.*?)"', asked)
    job = json.loads(printed("sh", "-c", asked.replace(prompt, PROMPT)))["id"]
    assert printed("sh", "-c", line.replace("ID", job)) == ANSWER
    # Its tokens are bytes, and the last one ends it.
    assert http_get(application, f"/jobs/{job}/text?after=4") == (200, ANSWER[4:])
    shown = eventually(lambda: json.loads(http_get(application, f"/jobs/{job}")[1]), "the job")
    assert shown == {"state": "completed", "text": ANSWER}
    for path in ("/jobs/nobody", "/jobs/nobody/text"):
        status, text = http_get(application, path)
        assert status == 404 and "nobody" in text
