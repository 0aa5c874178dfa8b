"""Settings that need each other: what cannot be had is refused, what changes nothing is told."""

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from service.shared.settings.sources import ConfigurationError
from service.worker.model.adapters import find_adapters
from service.worker.settings.combinations import without_effect
from service.worker.settings.config import Settings
from tests.service.builders import Queue
from tests.service.processes import REAL_WORKER, WorkerProcess


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """No variable of ours, and a working directory without a file."""
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("flags", "remedy", "mended"),
    [
        (
            "--preemption-mode swap --num-host-blocks 0",
            "set num_host_blocks to 1 or more",
            "--num-host-blocks 1",
        ),
        (
            "--preemption-mode recompute --num-host-blocks 8",
            "set preemption_mode to 'auto' or 'swap'",
            "--preemption-mode auto",
        ),
        (
            "--num-speculative-tokens 4 --max-speculative-step-tokens 1",
            "raise max_speculative_step_tokens",
            "--max-speculative-step-tokens 2",
        ),
        (
            "--num-speculative-tokens 4 --max-num-batched-tokens 1",
            "raise max_speculative_step_tokens and max_num_batched_tokens",
            "--max-num-batched-tokens 2",
        ),
        (
            "--pictures --model-path fast",
            "set model_path to 'auto' or 'wide'",
            "--model-path wide",
        ),
        (
            "--pictures --task embed",
            "set task to 'generate' or 'auto'",
            "--task generate",
        ),
        (
            "--class-shares 0.05,0.3,0.4,0.25 --max-num-seqs 3",
            "raise max_num_seqs",
            "--max-num-seqs 4",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_to_set(flags: str, remedy: str, mended: str):
    with pytest.raises(ConfigurationError, match=remedy):
        Settings.load(flags.split())
    assert Settings.load(f"{flags} {mended}".split())


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--max-prefill-tokens 90 --max-num-batched-tokens 90", "no step has more"),
        ("--max-speculative-step-tokens 9", "while num_speculative_tokens is 0"),
        ("--aging-seconds 9 --policy fcfs", "policy 'fcfs'"),
        ("--long-prefill-token-threshold 90 --max-num-batched-tokens 90", "no step has more"),
        ("--async-scheduling --device cpu", "on a CPU"),
        ("--max-num-batched-tokens 9", "at most 9 requests run at once"),
    ],
)
def test_what_changes_nothing_is_told(flags: str, reason: str):
    (clause,) = without_effect(Settings.load(flags.split()))
    assert reason in clause


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--policy fcfs --device cpu --preemption-mode recompute",
        "--max-prefill-tokens 9",
        "--max-speculative-step-tokens 9 --num-speculative-tokens 1",
        "--aging-seconds 9",
        "--long-prefill-token-threshold 90 --max-num-batched-tokens 91",
        "--no-async-scheduling --device cpu",
    ],
)
def test_of_what_has_an_effect_and_of_defaults_nothing_is_told(flags: str):
    assert list(without_effect(Settings.load(flags.split()))) == []


def test_a_variable_that_changes_nothing_is_told_as_a_flag_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUIRE_MAX_SPECULATIVE_STEP_TOKENS", "9")
    (clause,) = without_effect(Settings.load([]))
    assert clause.startswith("max_speculative_step_tokens has no effect")


def test_a_folder_without_adapters_is_told(tmp_path: Path):
    with capture_logs() as said:
        assert find_adapters(tmp_path) == {}
        assert find_adapters(None) == {}
    (line,) = said
    assert (line["log_level"], line["folder"]) == ("warning", str(tmp_path))


@pytest.mark.processes
def test_the_log_of_a_worker_tells_of_what_changes_nothing(queue: Queue, tmp_path: Path):
    flags = ("--model", str(tmp_path), "--device", "cpu", "--max-speculative-step-tokens", "9")
    with WorkerProcess(queue, *flags, module=REAL_WORKER) as process:
        assert process.wait() == 2
    events = [line["event"] for line in process.log if line["level"] == "warning"]
    assert [event for event in events if "max_speculative_step_tokens has no effect" in event]
