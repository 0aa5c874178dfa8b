"""The fast path and the wide path with a small batch, in turns in one process.

    python -m benchmarks.bench_paths [--models GEMMA3] [--dtype bfloat16] [--requests 1,4,8]
        [--prompt-tokens 32] [--output-tokens 64] [--rounds 3]

The requests of a batch arrive at once. Each round runs each path once, so that a slower machine
slows down both. The output tokens per second are medians over the rounds and include the prompts;
the ratio is the median of the rounds' ratios.

The gate, as in `benchmarks.common.gate`: each request has the requested number of tokens. In
float32, the tokens of both paths are those of transformers. In bfloat16, the fast path agrees with
transformers in float32 at least as often as the wide path. A model that fails the gate has no
figures.
"""

import argparse
import json
import random
import statistics
from collections.abc import Mapping
from pathlib import Path

from benchmarks.bench_engine import BenchedEngine, check
from benchmarks.common.arguments import names_of, numbers
from benchmarks.common.figures import machine
from benchmarks.common.gate import Agreement, Reference
from benchmarks.common.models import ARCHITECTURES, MODELS, vocab_size_of
from benchmarks.common.workloads import FIRST_TOKEN_ID, WorkItem, Workload
from quire.cli.console import positive

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


def compare(
    engines: Mapping[str, BenchedEngine],
    reference: Reference,
    workload: Workload,
    *,
    exact: bool,
    rounds: int,
) -> dict[str, object]:
    """Measures both paths of a model with one batch, and checks their tokens."""
    rates, tokens = measure(engines, workload, rounds=rounds)
    agreements = {}
    for path, engine in engines.items():
        check(engine, workload, tokens[path], exact=False)
        outputs = [tokens[path][f"{workload.name}-{i}"] for i in range(len(workload.items))]
        agreements[path] = reference.agreement(workload, outputs)
    pass_gate(agreements, exact=exact)
    return {
        "form": engines["fast"].runner.model.name,
        "tokens_per_second": {path: round(statistics.median(rates[path]), 1) for path in PATHS},
        "ratio": round(
            statistics.median(a / b for a, b in zip(*(rates[p] for p in PATHS), strict=True)), 2
        ),
        "agreement": {path: round(found.share, 4) for path, found in agreements.items()},
    }


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
        engines = {
            path: BenchedEngine(model, dtype=arguments.dtype, model_path=path) for path in PATHS
        }
        reference = Reference(model)
        for requests in arguments.requests:
            workload = small_batch(
                requests=requests,
                prompt_tokens=arguments.prompt_tokens,
                output_tokens=arguments.output_tokens,
                vocab_size=vocab_size_of(model),
            )
            found = compare(
                engines,
                reference,
                workload,
                exact=arguments.dtype == "float32",
                rounds=arguments.rounds,
            )
            title = f"{model} {arguments.dtype} x{requests}"
            record[title] = found
            _print(title, found)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


def _print(title: str, found: dict[str, object]) -> None:
    rates, agreement, ratio = found["tokens_per_second"], found["agreement"], found["ratio"]
    assert isinstance(rates, dict) and isinstance(agreement, dict) and isinstance(ratio, float)
    verdict = "" if ratio >= WANTED_RATIO else f"  below {WANTED_RATIO}"
    print(
        f"{title:24}{rates['fast']:>12.1f}{rates['wide']:>12.1f}{ratio:>8.2f}"
        f"  {agreement['fast']:.4f} {agreement['wide']:.4f}{verdict}",
        flush=True,
    )


if __name__ == "__main__":
    main()
