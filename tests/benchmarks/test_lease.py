"""The run on a lent device: its steps and their limits, what a step leaves, and what follows."""

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from tests.gpu.lease import __main__ as lease
from tests.gpu.lease.rules import RULES, verdicts
from tests.gpu.lease.running import figures_in, line_of, run_steps
from tests.gpu.lease.steps import SHAPES, STEPS, Step

ROOT = Path(__file__).resolve().parents[2]
#: In the order of their value.
LIMITS = {
    "limits": 15, "tests": 75, "takeover": 45, "0.6B": 70, "attention": 30, "8B": 90, "profile": 20,
    "deterministic": 15,
}  # fmt: skip
RECORD = (
    "step", "status", "exit_code", "seconds", "limit_seconds", "arguments", "figures", "output",
)  # fmt: skip
#: Long enough that a process can begin on a busy machine.
LIMIT = 8.0


def test_the_steps_come_in_order_of_value_and_end_within_six_minutes():
    assert {step.name: step.seconds for step in STEPS} == LIMITS
    assert list(LIMITS) == [step.name for step in STEPS]
    assert sum(LIMITS.values()) <= 360


@pytest.mark.parametrize("step", [step for step in STEPS if "{device}" in step.arguments])
@pytest.mark.parametrize("device", SHAPES)
def test_a_step_knows_what_it_is_told(step, device):
    values = SHAPES[device] | {"device": device, "json": "figures.json", "wheels": "wheels"}
    _, module, *flags = [part.format_map(values) for part in step.arguments]
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    program = import_module(f"{module}.__main__" if is_package else module)
    assert program.parser().parse_args(flags).device == device


def step_of(name: str, code: str) -> Step:
    return Step(name, LIMIT, ("-c", code, "{json}", "{device}"))


WRITE = (
    "import json, pathlib, sys;"
    "pathlib.Path(sys.argv[1]).write_text(json.dumps(dict(headline=sys.argv[2])))"
)
#: Writes its figures, starts a process that would outlive it, and waits for ever.
HANG = f"""{WRITE}
import signal, subprocess
child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])
print('child', child.pid, flush=True)
signal.pause()
"""


def test_a_step_that_hangs_or_fails_does_not_stop_the_next(tmp_path):
    steps = [
        step_of("hangs", HANG),
        step_of("fails", "raise SystemExit('no device')"),
        step_of("dies", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        step_of("ends", WRITE),
    ]
    found = {one["step"]: one for one in run_steps(steps, {"device": "lent"}, tmp_path)}
    assert {name: one["status"] for name, one in found.items()} == {
        "hangs": "killed", "fails": "failed", "dies": "failed", "ends": "ok",
    }  # fmt: skip
    for name, one in found.items():
        assert tuple(one) == RECORD
        assert json.loads((tmp_path / f"{name}.json").read_text()) == one
    assert (found["fails"]["figures"], found["fails"]["exit_code"]) == (None, 1)
    assert "no device" in line_of(found["fails"])
    assert found["dies"]["exit_code"] == -signal.SIGKILL
    # What a killed step had found by then is kept, and what it had started is gone.
    assert found["hangs"]["figures"] == found["ends"]["figures"] == {"headline": "lent"}
    assert has_ended(int(found["hangs"]["output"].split()[1]), seconds=30)
    assert not has_ended(os.getpid(), seconds=0)


def has_ended(pid: int, *, seconds: float) -> bool:
    """Whether a process ends within so many seconds, also one that nobody waits for."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], seconds)[0])
    finally:
        os.close(process)


def test_a_step_may_use_what_earlier_ones_left_over(tmp_path):
    first, second = run_steps(
        [step_of("one", WRITE), step_of("two", WRITE)], {"device": ""}, tmp_path
    )
    assert first["limit_seconds"] == LIMIT
    assert second["limit_seconds"] == pytest.approx(2 * LIMIT - first["seconds"])


def test_figures_that_were_cut_off_are_none(tmp_path):
    (tmp_path / "cut").write_text('{"cells": [')
    assert figures_in(tmp_path / "cut") is None
    assert figures_in(tmp_path / "absent") is None


def test_outcomes_of_tests_are_written_with_reasons(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 1 == 2\n"
        "def test_skips(): pytest.skip('no such kernel')\n"
    )
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    outcomes = tmp_path / "outcomes.json"
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    command += ["-p", "tests.gpu.lease.outcomes", "--outcomes", str(outcomes), "-n", "2"]
    command += ["--continue-on-collection-errors", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    found = json.loads(outcomes.read_text())
    assert found["headline"] == "1 passed, 2 failed, 1 skipped"
    assert "assert 1 == 2" in found["failures"]["test_some.py::test_fails"]
    assert "nothing_of_this_name" in found["failures"]["test_broken.py"]
    assert found["skips"] == {"Skipped: no such kernel": 1}


def figures(*, attention: float, decode: float = 0.8, mixed: float = 1.2):
    decodes = {"1x512": 0.9, "8x512": 0.9, "64x512": 0.85, "256x512": decode}
    cells = [{"cell": name, "share_of_bandwidth": share} for name, share in decodes.items()]
    cells += [
        {"cell": "256x512+64", "times_floor": 1.1},
        {"cell": "256x512+1792", "times_floor": mixed},
    ]
    ways = [{"cell": "64x4096", "way": "sdpa", "share_of_bandwidth": 0.99}]
    ways += [{"cell": "64x4096", "way": "triton", "share_of_bandwidth": attention}]
    return {"attention": {"cells": ways}, "8B": {"cells": cells}}


@pytest.mark.parametrize(
    ("share", "follows"),
    [(0.8, "one Triton kernel"), (0.79, "tune"), (0.6, "tune"), (0.59, "`flashinfer-python`")],
)
def test_the_share_of_the_copy_decides_the_attention(share, follows):
    attention, _ = verdicts(figures(attention=share))
    assert f"{share:.2f} of the copy: {follows}" in attention


@pytest.mark.parametrize(
    ("decode", "mixed", "follows"),
    [
        (0.75, 1.3, "native stays"), (0.74, 1.0, "the docs call native"),
        (0.95, 1.31, "the docs call native"),
    ],
)  # fmt: skip
def test_decodes_and_mixed_steps_decide_about_the_native_engine(decode, mixed, follows):
    _, native = verdicts(figures(attention=0.9, decode=decode, mixed=mixed))
    assert follows in native


def test_without_a_figure_nothing_is_decided():
    failed = figures(attention=0.9)
    failed["8B"]["cells"][3] = {"cell": "256x512", "error": "ArithmeticError: off by 3 %"}
    attention, native = verdicts({**failed, "attention": None})
    assert "Undecided: step attention has no 64x4096 triton" in attention
    assert "Undecided: 256x512 has no share_of_bandwidth: ArithmeticError: off by 3 %" in native


def test_a_rehearsal_says_that_it_decides_nothing(tmp_path, monkeypatch, capsys):
    # On a busy machine it takes longer to import torch.
    monkeypatch.setattr(lease, "STEPS", (replace(STEPS[0], seconds=90),))
    monkeypatch.setattr("sys.argv", ["lease", "--out", str(tmp_path), "--device", "cpu"])
    assert lease.main() == 0
    record = json.loads((tmp_path / "limits.json").read_text())
    assert (record["status"], record["figures"]["device"]) == ("ok", "CPU")
    assert record["figures"]["bytes_per_second"] > 0
    step, empty, *summary = capsys.readouterr().out.splitlines()
    assert step.split()[:2] == ["limits", "ok"]
    assert summary[0] == "A rehearsal on a CPU, which decides nothing:"
    assert [line.count("Undecided") for line in summary[1:]] == [1, 1]
    monkeypatch.setattr("sys.argv", ["lease", "--verdicts", str(tmp_path)])
    assert lease.main() == 0
    assert capsys.readouterr().out.splitlines() == [empty, *summary]


def test_the_rules_are_where_a_reader_finds_them():
    page = " ".join((ROOT / "benchmarks" / "results" / "gpu.md").read_text().split())
    for rule in RULES:
        assert rule.question in page
        for _, follows in rule.verdicts:
            assert follows in page
