"""The cost of planning a step, without a model: 1,000 requests running, 100,000 waiting.

    python -m benchmarks.bench_scheduler [--running 10,100,1000] [--waiting 1000,10000,100000]
        [--json FILE]

This is the steady state of a full engine: each running request decodes one token per step; lengths
are spread, so that in each step a sixteenth of the requests begins a block; and full blocks enter
the prefix cache. `schedule` and `apply` are the two halves of the scheduler's work. The whole step
is `Engine.step` with a runner that returns a constant; it also builds the output records. The gate:
each running request gains one token per step, no waiting request starts, and the invariants of the
engine hold at the end.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common.arguments import numbers, numbers_or_none
from benchmarks.common.figures import machine, percentile
from engine.batch import Batch, ComputedStep, LaunchedStep, StepResult
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sampling_params import SamplingParams

NUM_WARMUP_STEPS = 16
NUM_STEPS = 192
PROMPT_TOKENS = 64
BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
EOS = 2
#: The token that the runner returns; any token that ends no request.
TOKEN = 7
MAX_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians in milliseconds, and the 99th percentile of `schedule` and `apply` together."""

    running: int
    waiting: int
    schedule_ms: float
    apply_ms: float
    both_ms: float
    both_p99_ms: float
    whole_step_ms: float


class ConstantRunner:
    """Returns the same token for each row and computes nothing."""

    def launch(self, batch: Batch, *, after: LaunchedStep | None = None) -> ComputedStep:  # noqa: ARG002
        others = {row.request_id: TOKEN for row in batch.catch_up_rows if row.samples}
        return ComputedStep(StepResult([TOKEN] * len(batch.decodes), others))


def full_engine(num_running: int, num_waiting: int) -> Engine:
    """An engine in which `num_running` requests decode, the most that it runs at once."""
    most_tokens = PROMPT_TOKENS + BLOCK_SIZE + NUM_WARMUP_STEPS + 2 * NUM_STEPS
    config = EngineConfig(
        num_blocks=num_running * (most_tokens // BLOCK_SIZE + 2),
        max_model_len=4096,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * (PROMPT_TOKENS + BLOCK_SIZE),
    )
    engine = Engine(config, ConstantRunner())
    for index in range(num_running + num_waiting):
        prompt = [3 + index % (VOCAB_SIZE - 3)] * (PROMPT_TOKENS + index % BLOCK_SIZE)
        engine.add_request(
            Request(
                request_id=f"r{index}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=MAX_TOKENS),
                arrival_time=float(index),
            )
        )
    for _ in range(NUM_WARMUP_STEPS):
        engine.step(time.perf_counter)
    return engine


def measure(num_running: int, num_waiting: int) -> Row:
    """Times the two halves of a step, then whole steps, of the same engine."""
    engine = full_engine(num_running, num_waiting)
    scheduler, runner = engine._scheduler, ConstantRunner()
    planning, applying, whole = [], [], []
    clock = time.perf_counter
    for _ in range(NUM_STEPS):
        started = clock()
        batch = scheduler.schedule(now=0.0)
        planning.append(clock() - started)
        result = runner.launch(batch).outcome
        started = clock()
        progress = scheduler.apply(batch, result, now=0.0)
        applying.append(clock() - started)
        check(len(progress.requests) == num_running, "a running request did not get on")
    for _ in range(NUM_STEPS):
        started = clock()
        outputs = engine.step(clock)
        whole.append(clock() - started)
        check(len(outputs) == num_running, "a running request did not get on")
    snapshot = engine.snapshot()
    check(
        (snapshot.num_running, snapshot.num_waiting) == (num_running, num_waiting), "queues moved"
    )
    check(not engine.violations(), "a law of the engine is broken")
    both = [plan + apply for plan, apply in zip(planning, applying, strict=True)]
    return Row(
        running=num_running,
        waiting=num_waiting,
        schedule_ms=1e3 * statistics.median(planning),
        apply_ms=1e3 * statistics.median(applying),
        both_ms=1e3 * statistics.median(both),
        both_p99_ms=1e3 * percentile(both, 0.99),
        whole_step_ms=1e3 * statistics.median(whole),
    )


def check(holds: bool, otherwise: str) -> None:  # noqa: FBT001
    """The gate. SystemExit with the message if the condition does not hold."""
    if not holds:
        raise SystemExit(otherwise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=numbers, default="1,10,100,1000")
    parser.add_argument("--waiting", type=numbers_or_none, default="0,1000,10000,100000")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    arguments = parser.parse_args()
    rows = []
    print(f"{'':17} ---------- ms, median ---------   p99")
    print(
        f"{'running':>8} {'waiting':>8} {'schedule':>8} {'apply':>7} {'both':>7} {'both':>7}",
        end="",
    )
    print(f" {'whole step':>11} {'us/row':>7}")
    for num_running in arguments.running:
        for num_waiting in arguments.waiting:
            row = measure(num_running, num_waiting)
            rows.append(asdict(row))
            print(
                f"{row.running:>8} {row.waiting:>8} {row.schedule_ms:>8.3f} {row.apply_ms:>7.3f}"
                f" {row.both_ms:>7.3f} {row.both_p99_ms:>7.3f} {row.whole_step_ms:>11.3f}"
                f" {1e3 * row.both_ms / row.running:>7.2f}",
                flush=True,
            )
    if arguments.json:
        record = {"machine": machine(), "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
