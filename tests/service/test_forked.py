"""Programs that are forked with their imports behave like programs that are started."""

import json
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.service.builders import PATIENCE_SECONDS
from tests.service.forked import ForkedProgram

pytestmark = pytest.mark.processes

PROGRAM = """
import json, os, signal, sys
print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), __name__]), file=sys.stderr)
print("torch" in sys.modules, file=sys.stderr)
if sys.argv[1] == "wait":
    signal.pause()
os._exit(int(sys.argv[1]))
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Starts the program above with arguments."""
    (tmp_path / "forked_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    started: list[ForkedProgram] = []

    def start_one(*arguments: str) -> ForkedProgram:
        environ = {"ONLY": "this", "LC_CTYPE": "C.UTF-8"}
        started.append(
            ForkedProgram("forked_program", arguments, environ=environ, folder=str(tmp_path))
        )
        return started[-1]

    yield start_one
    for program in started:
        program.kill()
        program.wait(PATIENCE_SECONDS)


def test_it_has_its_arguments_its_folder_and_its_environment_alone(start, tmp_path: Path):
    program = start("3", "--flag")
    told, has_torch = program.stderr.read().splitlines()
    assert json.loads(told) == [
        ["3", "--flag"], str(tmp_path), {"ONLY": "this", "LC_CTYPE": "C.UTF-8"}, "__main__",
    ]  # fmt: skip
    assert has_torch == "True"
    assert program.wait(PATIENCE_SECONDS) == program.poll() == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_runs_until_a_signal_ends_it(start, number: int):
    program = start("wait")
    assert program.stderr.readline()
    assert program.poll() is None
    assert program.pid != os.getpid()
    program.send_signal(number)
    assert program.wait(PATIENCE_SECONDS) == -number


def test_the_process_that_starts_it_is_left_as_it_was(start):
    before = dict(os.environ), Path.cwd(), list(sys.argv)
    start("0").wait(PATIENCE_SECONDS)
    assert (dict(os.environ), Path.cwd(), list(sys.argv)) == before


def test_a_server_that_other_tests_have_started_is_replaced(start):
    program = start("0")
    program.wait(PATIENCE_SECONDS)
    forkserver._forkserver._stop()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["json"])
    forkserver.ensure_running()
    _, has_torch = start("3").stderr.read().splitlines()
    assert has_torch == "True"
