"""What `tests/conftest.py` does for every run: CPU seconds beside their budgets, and Ctrl-C."""

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.cpu_time import COLLECTION, CONTRIBUTING, budgets, cpu_seconds, table
from tests.interrupts import restore_interrupts

ROOT = Path(__file__).resolve().parents[2]
PAGE = """
| folder | budget in CPU seconds |
|---|---|
| `tests/engine` | 250 |
| `tests/ops`, `tests/house` | 40 |
| collection, in each process | 14 |
"""


def test_every_folder_of_tests_has_a_budget():
    files = ("*/**/test_*.py", "*/**/check_*.py")
    folders = {path.parent for pattern in files for path in (ROOT / "tests").glob(pattern)}
    names = {"/".join(folder.relative_to(ROOT).parts[:2]) for folder in folders}
    told = {name for names in budgets(CONTRIBUTING.read_text()) for name in names}
    assert told == names | {COLLECTION}


def test_what_is_spent_is_told_beside_its_budget():
    spent = Counter({"tests/engine": 251.0, "tests/ops": 20, "tests/house": 20, COLLECTION: 42.0})
    assert table(spent, PAGE, 3) == [
        "   251 of 250 s  tests/engine  OVER BUDGET",
        "    40 of  40 s  tests/ops, tests/house",
        "    14 of  14 s  collection, in each process",
    ]


def test_a_folder_without_a_budget_is_told():
    assert table(Counter({"tests/new": 3.0}), PAGE, 1) == ["     3 s, no budget  tests/new"]


def test_the_seconds_of_a_process_count_while_it_runs_and_after_its_end():
    before = cpu_seconds()
    code = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:
        process.stdout.readline()
        assert cpu_seconds() - before >= 0.4
        process.communicate("\n")
    assert cpu_seconds() - before >= 0.4


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_a_run_in_the_background_can_be_interrupted(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        restore_interrupts()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
