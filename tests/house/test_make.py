"""What the Makefile promises whoever types its commands."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CRASH = """
import os, signal
def test_crashes():
    os.kill(os.getpid(), signal.SIGKILL)
"""
PASS = """
import pytest
@pytest.mark.parametrize("number", range(8))
def test_passes(number):
    pass
"""


@pytest.mark.processes
def test_a_test_process_that_crashes_ends_the_run_with_a_failure(tmp_path):
    """With one put in its place, the run would wait for ever for the files that it was to test."""
    (flags,) = re.findall(r"-m pytest (.*) \$\(ARGS\)", (ROOT / "Makefile").read_text())
    (tmp_path / "pytest.ini").touch()
    for number in range(12):
        (tmp_path / f"test_{number}.py").write_text(CRASH if number == 4 else PASS)
    command = [sys.executable, "-m", "pytest"]
    command += shlex.split(flags.replace("$(TEST_PROCESSES)", "2"))
    mine = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(command, cwd=tmp_path, env=mine, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"worker 'gw\d' crashed while running 'test_4.py::test_crashes'", done.stdout)
