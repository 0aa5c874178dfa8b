"""The cost of `deterministic`: the same steps with and without it, alternating in one process.

    python -m benchmarks.bench_deterministic [--models TINY] [--dtype bfloat16] [--json FILE]

Each form of the model that this machine supports is loaded twice. A shape is rows x tokens at a
context of 256, as in `benchmarks.profile_step`. Each round runs both sides once; medians are
printed. The gate: with `deterministic`, requests generate the same tokens alone as together, in
every data type; and on both sides each request has the requested number of tokens.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.bench_engine import BenchedEngine, check
from benchmarks.common.arguments import names_of, step_shapes
from benchmarks.common.figures import machine
from benchmarks.common.models import SHAPES
from benchmarks.common.workloads import Workload, make_workload
from benchmarks.profile_parts import greedy_rows
from engine.batch import Batch
from quire.cli.usage import positive

CONTEXT = 256
#: Steps of each side before the clock starts.
WARM_UP_ROUNDS = 2
#: Form -> the options that select it, without `deterministic` and with it.
FORMS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "compiled": ({}, {}),
    "torch": (
        {"model_path": "fast", "attention_backend": "cpu"},
        {"model_path": "fast", "attention_backend": "single-token"},
    ),
    "wide": ({"model_path": "wide"}, {"model_path": "wide"}),
}
#: Requests of the gate, the most tokens of their prompts, and the tokens that each generates.
NUM_GATED = 6
GATED_PROMPT_TOKENS = 64
GATED_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Cost:
    """Median milliseconds of one step without and with `deterministic`, and their ratio."""

    plain_ms: float
    deterministic_ms: float
    ratio: float


def gated(vocab_size: int) -> Workload:
    """Some requests of W1, cut to the same length, so that they run together until the end."""
    items = (
        replace(
            item,
            prompt_token_ids=item.prompt_token_ids[:GATED_PROMPT_TOKENS],
            num_output_tokens=GATED_TOKENS,
        )
        for item in make_workload("W1", vocab_size=vocab_size).items[:NUM_GATED]
    )
    return Workload("gate", tuple(items))


def pass_gate(engine: BenchedEngine, *, deterministic: bool) -> None:
    """The gate. SystemExit if the outputs are wrong, because the figures would be meaningless."""
    workload = gated(engine.vocab_size)
    _, tokens = engine.run(workload)
    check(engine, workload, tokens, exact=deterministic)


def measure(
    plain: BenchedEngine, promised: BenchedEngine, *, shape: tuple[int, int], rounds: int
) -> Cost:
    """Times steps of both engines, alternating."""
    rows = tuple(greedy_rows(*shape, context=CONTEXT))
    times: dict[BenchedEngine, list[float]] = {plain: [], promised: []}
    for step in range(WARM_UP_ROUNDS + rounds):
        for engine, found in times.items():
            started = time.perf_counter()
            engine.runner.run(Batch(step, catch_up_rows=rows))
            found.append(1e3 * (time.perf_counter() - started))
    without, with_it = (statistics.median(each[WARM_UP_ROUNDS:]) for each in times.values())
    return Cost(without, with_it, with_it / without)


def costs(
    model: str, *, dtype: str, shapes: list[tuple[int, int]], rounds: int
) -> Iterator[tuple[str, dict[str, Cost]]]:
    """Yields each form with its costs by shape.

    If a form cannot be built here, the runner uses the next one instead; a form that was already
    measured is skipped.
    """
    seen = set()
    for plain_options, promised_options in FORMS.values():
        plain = BenchedEngine(model, dtype=dtype, **plain_options)
        name = plain.runner.model.name
        if name in seen:
            continue
        seen.add(name)
        promised = BenchedEngine(model, dtype=dtype, deterministic=True, **promised_options)
        if promised.runner.model.name != name:
            raise SystemExit(f"{name} without the promise, {promised.runner.model.name} with it")
        pass_gate(plain, deterministic=False)
        pass_gate(promised, deterministic=True)
        yield (
            name,
            {
                f"{shape[0]}x{shape[1]}": measure(plain, promised, shape=shape, rounds=rounds)
                for shape in shapes
            },
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names_of("model", SHAPES), default="TINY")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--shapes", type=step_shapes, default="1x1,64x1,1x128")
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    arguments = parser.parse_args()
    shapes = [
        (int(rows), int(tokens))
        for rows, _, tokens in (shape.partition("x") for shape in arguments.shapes)
    ]
    record: dict[str, object] = {"machine": machine()}
    for model in arguments.models:
        print(f"\n{model} {arguments.dtype}, context {CONTEXT}, ms a step: plain, deterministic")
        for name, found in costs(
            model, dtype=arguments.dtype, shapes=shapes, rounds=arguments.rounds
        ):
            cells = "".join(
                f"{shape:>9} {one.plain_ms:6.2f} {one.deterministic_ms:7.2f} ({one.ratio:.2f})"
                for shape, one in found.items()
            )
            print(f"{name:22}{cells}", flush=True)
            record[f"{model}-{arguments.dtype}-{name}"] = {
                shape: asdict(one) for shape, one in found.items()
            }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
