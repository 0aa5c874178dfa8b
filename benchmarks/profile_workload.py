"""The time of a workload by the number of tokens per step, compared with each step's floor.

    python -m benchmarks.profile_workload [--models SMALL] [--workload W1] [--dtype bf16] [--runs 3]

The floor of a workload assumes that all its arithmetic and all its reading overlap. The steps of a
schedule cannot do that: during a chunk of a prompt the memory is idle, and during a few decodes the
cores are idle. So the sum of the steps' floors is the best time of this schedule. The gap between
this sum and the workload's floor is due to the schedule; the gap between the measured time and this
sum is due to the kernels.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.bench_engine import MAX_NUM_BATCHED_TOKENS, BenchedEngine
from benchmarks.common.arguments import names_of
from benchmarks.common.floor import (
    BYTES_PER_VALUE,
    Limits,
    Work,
    kv_values_per_token,
    measure_limits,
    weights_per_token,
    work_of,
)
from benchmarks.common.models import SHAPES
from benchmarks.common.workloads import NAMES, Workload, make_workload
from benchmarks.peers.quire_engine import DTYPES
from engine.batch import Batch, LaunchedStep, Runner
from quire.cli.usage import positive

#: Upper bounds of the table's lines, in tokens per step.
BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, MAX_NUM_BATCHED_TOKENS)


@dataclass(frozen=True, slots=True)
class Step:
    """One step: the tokens it computed and sampled, the KV entries it read, and its time."""

    num_tokens: int
    num_due: int
    num_read: int
    seconds: float


class Case(NamedTuple):
    """The name of a model, and the short name of its data type."""

    model: str
    dtype: str


class Recorder:
    """A runner that passes steps to another one and records them. It must compute in `launch`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.steps: list[Step] = []

    def launch(self, batch: Batch, *, after: LaunchedStep | None = None) -> LaunchedStep:
        read = int((batch.decodes.starts + 1).sum()) + sum(row.start for row in batch.catch_up_rows)
        sizes = batch.num_tokens, len(batch.due), read
        started = time.perf_counter()
        launched = self._runner.launch(batch, after=after)
        self.steps.append(Step(*sizes, time.perf_counter() - started))
        return launched


def floor_of(step: Step, shape: dict[str, int], *, dtype: str) -> Work:
    """The least work of a step: its products, one reading of the weights, and of its KV entries."""
    body, head = weights_per_token(shape)
    kv_values = kv_values_per_token(shape)
    values = body + head * (step.num_due > 0) + kv_values * step.num_read
    return Work(
        operations=2.0 * (body * step.num_tokens + head * step.num_due),
        bytes_read=float(BYTES_PER_VALUE[dtype] * values),
    )


def print_run(
    steps: Sequence[Step], limits: Limits, workload: Workload, *, case: Case, wall: float
) -> None:
    """Prints one line for each range of step sizes, then the totals."""
    floors = [floor_of(step, SHAPES[case.model], dtype=case.dtype) for step in steps]
    print(f"{'tokens':>9}{'steps':>7}{'ms a step':>11}{'arithmetic':>12}{'reading':>9}{'share':>7}")
    for low, high in zip((0, *BOUNDS), BOUNDS, strict=False):
        chosen = [index for index, step in enumerate(steps) if low < step.num_tokens <= high]
        if not chosen:
            continue
        seconds = statistics.fmean(steps[index].seconds for index in chosen)
        operations = statistics.fmean(floors[index].operations for index in chosen)
        bytes_read = statistics.fmean(floors[index].bytes_read for index in chosen)
        least = statistics.fmean(floors[index].seconds(limits) for index in chosen)
        print(
            f"{low + 1:>4}-{high:<4}{len(chosen):>7}{1e3 * seconds:>11.2f}"
            f"{1e3 * operations / limits.operations_per_second:>12.2f}"
            f"{1e3 * bytes_read / limits.bytes_per_second:>9.2f}{least / seconds:>7.2f}"
        )
    in_steps = sum(step.seconds for step in steps)
    of_steps = sum(floor.seconds(limits) for floor in floors)
    of_workload = work_of(workload, SHAPES[case.model], dtype=case.dtype).seconds(limits)
    print(
        f"{wall:.2f} s, {in_steps:.2f} of them in steps; the steps' floors are {of_steps:.2f} s, "
        f"the workload's is {of_workload:.2f}.\n"
        f"Share of the workload's floor: {of_workload / wall:.3f}. This schedule's limit is "
        f"{of_workload / of_steps:.3f}, and {of_steps / wall:.3f} of that is reached.",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names_of("model", SHAPES), default="SMALL")
    parser.add_argument("--workload", choices=NAMES, default="W1")
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPES))
    parser.add_argument("--runs", type=positive, default=3)
    arguments = parser.parse_args()
    for model in arguments.models:
        case = Case(model, arguments.dtype)
        engine = BenchedEngine(model, dtype=DTYPES[case.dtype])
        # As in bench_peers: the time in which the system provides memory is not measured.
        engine.runner.kv_pool.touch(range(engine.runner.kv_pool.num_blocks))
        recorder = Recorder(engine.runner)
        engine.compute_by(recorder)
        workload = make_workload(arguments.workload, vocab_size=engine.vocab_size)
        for _ in range(arguments.runs):
            recorder.steps.clear()
            before, _ = measure_limits(SHAPES[model], dtype=case.dtype)
            started = time.perf_counter()
            engine.run(workload)
            wall = time.perf_counter() - started
            after, _ = measure_limits(SHAPES[model], dtype=case.dtype)
            limits = before.best_with(after)
            print(f"\n{model} {case.dtype} {workload.name}, {limits.rounded()}")
            print_run(recorder.steps, limits, workload, case=case, wall=wall)


if __name__ == "__main__":
    main()
