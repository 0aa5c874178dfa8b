"""The parts of the time of a step: layers, attention and head, each compared with its floor.

    python -m benchmarks.profile_parts [--models TINY,SMALL] [--dtype bf16] [--context 256]
        [--shapes 1x1,8x1,64x1,1x256] [--rounds 15]

The parts are differences between whole steps, which alternate. A step whose rows sample no token
lacks the head, the sampling, and everything after the keys and values of the last layer. A step
with the shortest context lacks nearly all of attention. The remaining time is that of the layers:
products, norms, rotation and barriers. A shape is rows x tokens, as in `profile_step`.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

from benchmarks.common.arguments import names_of, step_shapes
from benchmarks.common.floor import (
    BYTES_PER_VALUE,
    Limits,
    Work,
    kv_values_per_token,
    measure_limits,
    weights_per_token,
)
from benchmarks.common.models import SHAPES, model_folder
from benchmarks.peers.quire_engine import DTYPES, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from benchmarks.profile_step import BLOCK_SIZE, WARM_UP_ROUNDS, make_rows
from engine.batch import Batch, BatchRow
from engine.model.load.load_runner import load_runner
from engine.model.run.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from quire.cli.usage import positive


@dataclass(frozen=True, slots=True)
class Parts:
    """Milliseconds of each part of a step; `whole` is the whole step."""

    layers: float
    attention: float
    head: float
    whole: float


def floor_of(
    model: str, num_rows: int, num_tokens: int, *, context: int, dtype: str, limits: Limits
) -> Parts:
    """The shortest possible time of each part in milliseconds, from the limits of this machine.

    For attention only the reading of keys and values counts.
    """
    shape, size = SHAPES[model], BYTES_PER_VALUE[dtype]
    body, head = weights_per_token(shape)
    kv_values = kv_values_per_token(shape)
    parts = [
        Work(2.0 * body * num_rows * num_tokens, float(size * body)),
        Work(0.0, float(size * kv_values * num_rows * context)),
        Work(2.0 * head * num_rows, float(size * head)),
    ]
    layers, attention, last = (1e3 * part.seconds(limits) for part in parts)
    return Parts(layers, attention, last, layers + attention + last)


def measure(
    runner: ModelRunner, num_rows: int, num_tokens: int, *, context: int, rounds: int
) -> Parts:
    """Times whole steps, steps without the head, and steps with the shortest context."""
    whole = greedy_rows(num_rows, num_tokens, context=context)
    variants: dict[str, list[BatchRow]] = {
        "whole": whole,
        "without head": [row._replace(samples=False) for row in whole],
        "without context": greedy_rows(num_rows, num_tokens, context=max(num_tokens, BLOCK_SIZE)),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for step in range(WARM_UP_ROUNDS + rounds):
        for name, rows in variants.items():
            batch = Batch(step=step, catch_up_rows=tuple(rows))
            started = time.perf_counter()
            runner.run(batch)
            times[name].append(1e3 * (time.perf_counter() - started))
    median = {name: statistics.median(each[WARM_UP_ROUNDS:]) for name, each in times.items()}
    head = median["whole"] - median["without head"]
    attention = median["whole"] - median["without context"]
    return Parts(median["whole"] - head - attention, attention, head, median["whole"])


def greedy_rows(num_rows: int, num_tokens: int, *, context: int) -> list[BatchRow]:
    """Rows of `profile_step` with greedy sampling."""
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    rows = make_rows(num_rows, num_tokens, context=context)
    return [row._replace(sampling=greedy) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names_of("model", SHAPES), default="TINY,SMALL")
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPES))
    parser.add_argument("--shapes", type=step_shapes, default="1x1,8x1,64x1,1x256")
    parser.add_argument("--context", type=positive, default=256)
    parser.add_argument("--rounds", type=positive, default=15)
    arguments = parser.parse_args()
    for name in arguments.models:
        runner = load_runner(
            model_folder(name),
            dtype=DTYPES[arguments.dtype],
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            num_blocks=MAX_NUM_SEQS * -(-arguments.context // BLOCK_SIZE),
        )
        limits, _ = measure_limits(SHAPES[name], dtype=arguments.dtype)
        print(f"\n{name} {arguments.dtype}, context {arguments.context}, {limits.rounded()}")
        print(f"{'ms (floor)':14}" + "".join(f"{part:>20}" for part in Parts.__slots__))
        for shape in arguments.shapes:
            sizes = [int(size) for size in shape.split("x")]
            context = max(arguments.context, sizes[1])
            found = measure(runner, *sizes, context=context, rounds=arguments.rounds)
            least = floor_of(name, *sizes, context=context, dtype=arguments.dtype, limits=limits)
            line = "".join(
                f"{getattr(found, part):>11.2f} ({getattr(least, part):6.2f})"
                for part in Parts.__slots__
            )
            print(f"{shape:14}{line}", flush=True)


if __name__ == "__main__":
    main()
