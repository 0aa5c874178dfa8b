"""The fast path and the wide path with a small batch, in turns in one process.

    python -m benchmarks.bench_paths [--models GEMMA3] [--dtype bfloat16] [--requests 1,4,8]
        [--prompt-tokens 32] [--output-tokens 64] [--rounds 3]

The requests of a batch arrive at once. Each round runs each path once, so that a slower machine
slows down both. The output tokens per second are medians over the rounds and include the prompts;
the ratio is the median of the rounds' ratios.

The gate, as in `benchmarks.common.gate`: each request has the requested number of tokens. In
float32, the tokens of both paths are those of transformers. In bfloat16, the fast path agrees with
transformers in float32 at least as often as the wide path, over all batches of a model. A model
that fails the gate has no figures.
"""

import argparse
import json
import random
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.bench_engine import BenchedEngine, check
from benchmarks.common.arguments import names_of, numbers
from benchmarks.common.figures import machine
from benchmarks.common.gate import NOTHING_READ, Agreement, Reference
from benchmarks.common.models import ARCHITECTURES, MODELS, vocab_size_of
from benchmarks.common.workloads import FIRST_TOKEN_ID, WorkItem, Workload
from quire.cli.usage import positive

PATHS = ("fast", "wide")
#: The ratio that the fast path should reach with a small batch.
WANTED_RATIO = 4.0


def small_batch(
    *, requests: int, prompt_tokens: int, output_tokens: int, vocab_size: int
) -> Workload:
    """Requests of one length, with random prompts that are always the same."""
    ids = random.Random(0)
    items = (
        WorkItem(
            tuple(ids.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(prompt_tokens)),
            output_tokens,
        )
        for _ in range(requests)
    )
    return Workload("paths", tuple(items))


def pass_gate(agreements: Mapping[str, Agreement], *, exact: bool) -> None:
    """The gate. SystemExit if the outputs are wrong, because the figures would be meaningless."""
    fast, wide = (agreements[path] for path in PATHS)
    for path, found in agreements.items():
        if exact and found.num_agreed != found.num_tokens:
            raise SystemExit(f"the {path} path generates other tokens than transformers: {found}")
    if fast.share < wide.share:
        raise SystemExit(f"the fast path agrees less often than the wide path: {fast}, {wide}")


def measure(
    engines: Mapping[str, BenchedEngine], workload: Workload, *, rounds: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, list[int]]]]:
    """Output tokens per second of each round by path, and the tokens of the last round."""
    rates: dict[str, list[float]] = {path: [] for path in engines}
    tokens: dict[str, dict[str, list[int]]] = {}
    for number in range(1 + rounds):
        for path, engine in engines.items():
            figures, tokens[path] = engine.run(workload)
            # The first round maps memory.
            if number:
                rates[path].append(figures.output_tokens_per_second)
    return rates, tokens


@dataclass(frozen=True, slots=True)
class Comparison:
    """One batch: output tokens per second by path, the ratio, and the agreements of the paths."""

    rates: dict[str, float]
    ratio: float
    agreements: dict[str, Agreement]


def compare(
    engines: Mapping[str, BenchedEngine],
    reference: Reference,
    workload: Workload,
    *,
    rounds: int,
) -> Comparison:
    """Measures both paths of a model with one batch, and checks their tokens."""
    rates, tokens = measure(engines, workload, rounds=rounds)
    agreements = {}
    for path, engine in engines.items():
        check(engine, workload, tokens[path], exact=False)
        outputs = [tokens[path][f"{workload.name}-{i}"] for i in range(len(workload.items))]
        agreements[path] = reference.agreement(workload, outputs)
    ratios = [fast / wide for fast, wide in zip(*(rates[path] for path in PATHS), strict=True)]
    medians = {path: statistics.median(rates[path]) for path in PATHS}
    return Comparison(medians, statistics.median(ratios), agreements)


def compare_batches(model: str, arguments: argparse.Namespace) -> dict[str, Comparison]:
    """Title -> comparison, for each size of the batch; SystemExit if the gate is not passed."""
    engines = {path: BenchedEngine(model, dtype=arguments.dtype, model_path=path) for path in PATHS}
    reference, found = Reference(model), {}
    for requests in arguments.requests:
        workload = small_batch(
            requests=requests,
            prompt_tokens=arguments.prompt_tokens,
            output_tokens=arguments.output_tokens,
            vocab_size=vocab_size_of(model),
        )
        title = f"{model} {arguments.dtype} x{requests}"
        found[title] = compare(engines, reference, workload, rounds=arguments.rounds)
    totals = {
        path: sum((one.agreements[path] for one in found.values()), NOTHING_READ) for path in PATHS
    }
    pass_gate(totals, exact=arguments.dtype == "float32")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names_of("model", MODELS), default=",".join(ARCHITECTURES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--requests", type=numbers, default="1,4,8", help="sizes of batches")
    parser.add_argument("--prompt-tokens", type=positive, default=32)
    parser.add_argument("--output-tokens", type=positive, default=64)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    arguments = parser.parse_args()
    record: dict[str, object] = {"machine": machine()}
    print(f"{machine()}\n{'':24}{'fast tok/s':>12}{'wide tok/s':>12}{'ratio':>8}  agreement")
    for model in arguments.models:
        for title, found in compare_batches(model, arguments).items():
            record[title] = asdict(found)
            shares = " ".join(f"{one.share:.4f}" for one in found.agreements.values())
            verdict = "" if found.ratio >= WANTED_RATIO else f"  below {WANTED_RATIO}"
            rates = "".join(f"{found.rates[path]:>12.1f}" for path in PATHS)
            print(f"{title:24}{rates}{found.ratio:>8.2f}  {shares}{verdict}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
