"""How many threads a step has: fewer while others have their cores, and more again afterwards."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from engine.model.device.step_threads import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    PAUSE_PER_TRIAL,
    SHORTEST_PAUSE,
    TRIAL_WINDOW,
    WINDOW,
    StepThreads,
)

MS = 1_000_000


@dataclass
class Machine:
    """A scheduler with `free` cores: threads beyond them wait half of the time."""

    free: int
    now: int = 1
    since: int = 0

    def begin(self) -> None:
        self.since = 0

    def elapsed(self) -> int:
        return self.now

    def delayed(self) -> int:
        return self.since

    def compute(self, nanoseconds: int) -> None:
        without_core = max(0, torch.get_num_threads() - self.free)
        self.now += nanoseconds
        self.since += without_core * nanoseconds * 6 // 10


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def begin(machine: Machine, most: int) -> StepThreads:
    torch.set_num_threads(most)
    threads = StepThreads(most, machine)
    threads.adjust()
    return threads


def compute(threads: StepThreads, machine: Machine, nanoseconds: int, step: int = 10 * MS) -> None:
    end = machine.now + nanoseconds
    while machine.now < end:
        machine.compute(step)
        threads.adjust()


def test_with_a_core_for_each_thread_nothing_changes():
    machine = Machine(free=4)
    threads = begin(machine, 4)
    compute(threads, machine, 50 * WINDOW)
    assert threads.count == torch.get_num_threads() == 4


def test_a_core_that_is_taken_away_costs_one_thread_and_only_one():
    machine = Machine(free=3)
    threads = begin(machine, 4)
    compute(threads, machine, WINDOW)
    assert threads.count == torch.get_num_threads() == 3


def test_several_cores_that_are_taken_away_are_given_up_at_once():
    machine = Machine(free=1)
    threads = begin(machine, 8)
    compute(threads, machine, 20 * MS, step=20 * MS)
    assert threads.count == 3
    compute(threads, machine, 5 * WINDOW)
    assert threads.count == 1


def test_a_short_delay_changes_nothing():
    machine = Machine(free=2)
    threads = begin(machine, 2)
    machine.since = 40 * MS  # Less than a half of a window, at its very beginning.
    compute(threads, machine, 5 * WINDOW)
    assert threads.count == 2


def test_a_core_that_comes_back_is_used_after_the_pause():
    machine = Machine(free=1)
    threads = begin(machine, 2)
    compute(threads, machine, WINDOW)
    compute(threads, machine, FIRST_PAUSE + TRIAL_WINDOW)
    assert threads.count == 1
    machine.free = 2
    compute(threads, machine, SHORTEST_PAUSE - WINDOW)
    assert threads.count == 1
    compute(threads, machine, 2 * WINDOW)
    assert threads.count == 2
    compute(threads, machine, 50 * WINDOW)
    assert threads.count == 2


def test_after_a_burst_of_work_of_others_the_core_is_used_again_soon():
    machine = Machine(free=2)
    threads = begin(machine, 2)
    compute(threads, machine, 10 * WINDOW)
    machine.free = 1
    compute(threads, machine, WINDOW)
    assert threads.count == 1
    machine.free = 2
    compute(threads, machine, FIRST_PAUSE + 2 * TRIAL_WINDOW)
    assert threads.count == 2


def test_a_core_that_is_taken_away_soon_after_its_trial_is_left_alone_for_the_long_pause():
    machine = Machine(free=2)
    threads = begin(machine, 2)
    for free in (1, 2, 1):
        machine.free = free
        compute(threads, machine, FIRST_PAUSE + 2 * TRIAL_WINDOW)
    assert threads.count == 1
    machine.free = 2
    compute(threads, machine, SHORTEST_PAUSE // 2)
    assert threads.count == 1
    compute(threads, machine, SHORTEST_PAUSE)
    assert threads.count == 2


def test_all_cores_that_come_back_are_used_one_trial_after_the_other():
    machine = Machine(free=1)
    threads = begin(machine, 4)
    compute(threads, machine, 2 * WINDOW)
    assert threads.count == 1
    machine.free = 4
    compute(threads, machine, SHORTEST_PAUSE + 10 * WINDOW)
    assert threads.count == 4


@pytest.mark.parametrize("step", [1 * MS, 10 * MS, 200 * MS])
def test_trials_beside_a_busy_process_cost_less_than_a_twentieth(step):
    machine = Machine(free=1)
    threads = begin(machine, 2)
    compute(threads, machine, 10 * WINDOW, step)
    tried = 0
    begun = machine.now
    while machine.now < begun + 100 * SHORTEST_PAUSE:
        tried += step if threads.count == 2 else 0
        machine.compute(step)
        threads.adjust()
    assert 0 < tried < (machine.now - begun) / 20


def test_a_trial_of_a_very_long_step_is_repeated_after_the_longest_pause():
    machine = Machine(free=1)
    threads = begin(machine, 2)
    step = LONGEST_PAUSE // PAUSE_PER_TRIAL * 2
    counts = []
    for _ in range(3 * LONGEST_PAUSE // step):
        machine.compute(step)
        threads.adjust()
        counts.append(threads.count)
    assert 2 <= counts.count(2) <= 4


def test_a_trial_is_judged_as_soon_as_its_delay_is_clear():
    machine = Machine(free=1)
    threads = begin(machine, 2)
    compute(threads, machine, SHORTEST_PAUSE)
    while threads.count == 1:
        compute(threads, machine, 10 * MS)
    compute(threads, machine, TRIAL_WINDOW)
    assert threads.count == 1


def test_one_thread_asks_nothing_of_the_system():
    torch.set_num_threads(1)
    machine = Machine(free=0)
    machine.elapsed = None  # type: ignore[assignment]
    StepThreads(1, machine).adjust()


def test_where_the_system_does_not_count_delays_the_number_stays(monkeypatch):
    def refuse() -> None:
        raise FileNotFoundError("schedstat")

    monkeypatch.setattr("engine.model.device.step_threads.RunDelays", refuse)
    torch.set_num_threads(3)
    threads = StepThreads(3)
    for _ in range(3):
        threads.adjust()
    assert threads.count == torch.get_num_threads() == 3


def test_delays_that_cannot_be_read_any_more_cost_no_step_and_no_thread():
    machine = Machine(free=1)
    threads = begin(machine, 2)
    compute(threads, machine, WINDOW)
    assert threads.count == 1

    def refuse() -> None:
        raise OSError("too many open files")

    machine.begin = refuse  # type: ignore[method-assign]
    compute(threads, machine, 2 * WINDOW)
    assert threads.count == torch.get_num_threads() == 2


def test_a_number_that_another_runner_has_chosen_is_taken_over():
    machine = Machine(free=4)
    threads = begin(machine, 4)
    torch.set_num_threads(2)
    threads.adjust()
    assert threads.count == 2
    compute(threads, machine, 10 * WINDOW)
    assert threads.count == 4


#: Two threads that have one core between them, as beside a busy process. Models are loaded on all
#: cores: that is not what is tested.
PINNED = """
import os, sys
import torch
torch.set_num_threads(2)
from engine.model.load.load_runner import load_runner
from tests.engine.model.builders import make_row, run_rows

def run(runner):
    return tuple(run_rows(runner, make_row(range(5, 165))).items())

runners = [
    load_runner(sys.argv[1], max_num_seqs=8, num_blocks=128, model_path=path)
    for path in ("fast", "wide")
]
tokens = [{run(runner)} for runner in runners]
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), {min(os.sched_getaffinity(0))})
for runner, seen in zip(runners, tokens):
    torch.set_num_threads(2)
    for step in range(100_000):
        seen.add(run(runner))
        if runner.num_threads() == 1:
            break
    print(torch.get_num_threads(), len(seen), flush=True)
"""


def test_threads_that_share_a_core_become_one_with_the_same_tokens(model_folder):
    found = subprocess.run(
        [sys.executable, "-c", PINNED, str(model_folder("llama"))],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert found.stdout.split() == ["1", "1"] * 2, found.stderr
