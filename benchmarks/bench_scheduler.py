"""What planning a step costs: 1,000 requests running and up to 10,000 waiting, no model behind.

    python -m benchmarks.bench_scheduler [--json FILE]

The runner answers with a constant, so that all time measured is the engine's own: schedule, apply,
and the records that go in and out. The gate: every running request gains one token per step.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request
from engine.sampling_params import SamplingParams

NUM_WARMUP_STEPS = 5
NUM_STEPS = 200
PROMPT_TOKENS = 64
BLOCK_SIZE = 16


class ConstantRunner:
    """Answers every row with the same token and computes nothing."""

    def run(self, batch: Batch) -> dict[str, int]:
        return {row.request_id: 7 for row in batch.rows if row.samples}


def measure(num_running: int, num_waiting: int) -> dict[str, float]:
    """Median milliseconds of one decode step, whole and by half."""
    blocks_each = (PROMPT_TOKENS + NUM_STEPS) // BLOCK_SIZE + 2
    config = EngineConfig(
        num_blocks=num_running * blocks_each,
        max_model_len=4096,
        vocab_size=1000,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * PROMPT_TOKENS,
        enable_prefix_caching=False,
    )
    engine = Engine(config, ConstantRunner())
    for index in range(num_running + num_waiting):
        engine.add_request(
            Request(
                request_id=f"r{index}",
                prompt_token_ids=[1 + index % 900] * PROMPT_TOKENS,
                sampling=SamplingParams(max_tokens=2048),
                arrival_time=float(index),
            )
        )
    for _ in range(NUM_WARMUP_STEPS):
        engine.step(time.perf_counter)
    scheduler = engine._scheduler
    whole, planning = [], []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        outputs = engine.step(time.perf_counter)
        whole.append(time.perf_counter() - started)
        assert len(outputs) == num_running, "a running request did not get on"
        # Planning twice is free of consequences: nothing advances before it is applied.
        started = time.perf_counter()
        scheduler.schedule(now=0.0)
        planning.append(time.perf_counter() - started)
    snapshot = engine.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting) == (num_running, num_waiting)
    return {
        "running": num_running,
        "waiting": num_waiting,
        "step_ms": 1e3 * statistics.median(whole),
        "schedule_ms": 1e3 * statistics.median(planning),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    arguments = parser.parse_args()
    rows = [measure(*size) for size in [(1, 0), (100, 0), (1000, 0), (1000, 10_000), (100, 10_000)]]
    print(f"{'running':>8} {'waiting':>8} {'schedule ms':>12} {'whole step ms':>14} {'us/row':>8}")
    for row in rows:
        per_row = 1e3 * row["step_ms"] / row["running"]
        print(
            f"{row['running']:>8} {row['waiting']:>8} {row['schedule_ms']:>12.3f}"
            f" {row['step_ms']:>14.3f} {per_row:>8.2f}"
        )
    if arguments.json:
        record = {"python": platform.python_version(), "machine": platform.machine(), "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
