"""Programs that are forked with their imports behave like programs that are started."""

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.service.builders import PATIENCE_SECONDS
from tests.service.forked import MODEL, SERVICE, ForkedProgram

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

    def start_one(*arguments: str, imports: tuple[str, ...] = SERVICE) -> ForkedProgram:
        where = {"environ": {"ONLY": "this", "LC_CTYPE": "C.UTF-8"}, "folder": str(tmp_path)}
        started.append(ForkedProgram("forked_program", arguments, imports=imports, **where))
        return started[-1]

    yield start_one
    for program in started:
        program.kill()
        program.wait(PATIENCE_SECONDS)


def test_it_has_its_arguments_its_folder_and_its_environment_alone(start, tmp_path: Path):
    program = start("3", "--flag")
    told, _ = program.stderr.read().splitlines()
    assert json.loads(told) == [
        ["3", "--flag"], str(tmp_path), {"ONLY": "this", "LC_CTYPE": "C.UTF-8"}, "__main__",
    ]  # fmt: skip
    assert program.wait(PATIENCE_SECONDS) == program.poll() == 3


@pytest.mark.parametrize(("imports", "has_torch"), [(SERVICE, "False"), (MODEL, "True")])
def test_it_has_the_imports_of_its_kind_alone(start, imports: tuple[str, ...], has_torch: str):
    assert start("0", imports=imports).stderr.read().splitlines()[-1] == has_torch
    # A server passes over a module that there is not.
    assert all(importlib.util.find_spec(name) for name in imports)


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
