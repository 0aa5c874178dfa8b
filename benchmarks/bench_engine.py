"""The engine alone: tokens per second, time to first token, time between tokens. No Redis, no text.

    python -m benchmarks.bench_engine [--models TINY,SMALL] [--workloads W1,W2] [--dtype bfloat16]

The gate: each request has exactly the requested number of tokens. In float32, some requests also
run again alone and must give the same tokens. A run that fails the gate prints no figures.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import names_of
from benchmarks.common.figures import Figures, figures_of, machine, median_run
from benchmarks.common.models import SHAPES, model_folder
from benchmarks.common.workloads import NAMES, Workload, make_workload
from engine.batch import Runner
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.load.load_runner import load_runner
from engine.request import Request
from engine.sampling_params import SamplingParams
from quire.cli.usage import positive

MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 256
KV_CACHE_BYTES = 2 << 30
#: Requests that run again alone, to check that batching changed nothing.
NUM_CHECKED_ALONE = 4


class BenchedEngine:
    """One loaded model for many runs; `options` are those of `load_runner`."""

    def __init__(self, model: str, *, dtype: str, **options: Any) -> None:
        started = time.perf_counter()
        self.runner = load_runner(
            model_folder(model),
            dtype=dtype,
            **options,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
        )
        self.load_seconds = time.perf_counter() - started
        facts = self.runner.config_facts
        self.vocab_size = facts.vocab_size
        self.config = EngineConfig(
            num_blocks=facts.num_blocks,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            block_size=facts.block_size,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            # Off, because runs repeat their prompts, and their computation is to be measured.
            enable_prefix_caching=False,
        ).with_states(facts.states)
        self._engine = Engine(self.config, self.runner)

    def compute_by(self, runner: Runner) -> None:
        """Use this runner for all further steps; it may pass them on to the original one."""
        self._engine = Engine(self.config, runner)

    def run(self, workload: Workload) -> tuple[Figures, dict[str, list[int]]]:
        """Run a workload on an idle engine; returns figures, and tokens by request id."""
        return run_workload(self._engine, workload)


def run_workload(engine: Engine, workload: Workload) -> tuple[Figures, dict[str, list[int]]]:
    """Run a workload on an idle engine; returns figures, and tokens by request id."""
    for index, item in enumerate(workload.items):
        engine.add_request(
            Request(
                request_id=f"{workload.name}-{index}",
                prompt_token_ids=list(item.prompt_token_ids),
                sampling=SamplingParams(
                    max_tokens=item.num_output_tokens, temperature=0.0, ignore_eos=True
                ),
                arrival_time=0.0,
            )
        )
    arrivals: dict[str, list[tuple[float, int]]] = {}
    tokens: dict[str, list[int]] = {f"{workload.name}-{i}": [] for i in range(len(workload.items))}
    started = time.perf_counter()
    while engine.has_work():
        outputs = engine.step(time.perf_counter)
        now = time.perf_counter() - started
        for output in outputs:
            arrivals.setdefault(output.request_id, []).append((now, len(output.token_ids)))
            tokens[output.request_id].extend(output.token_ids)
    return figures_of(arrivals), tokens


def check_lengths(workload: Workload, tokens: dict[str, list[int]]) -> None:
    """The gate for the number of tokens of each request. SystemExit."""
    for index, item in enumerate(workload.items):
        if len(tokens[f"{workload.name}-{index}"]) != item.num_output_tokens:
            raise SystemExit(f"{workload.name}: request {index} has the wrong length")


def check(
    engine: BenchedEngine, workload: Workload, tokens: dict[str, list[int]], *, exact: bool
) -> None:
    """The gate. SystemExit if the outputs are wrong, because the figures would be meaningless."""
    check_lengths(workload, tokens)
    if exact:
        for index, item in enumerate(workload.items[:NUM_CHECKED_ALONE]):
            _, alone = engine.run(Workload("alone", (item,)))
            if alone["alone-0"] != tokens[f"{workload.name}-{index}"]:
                raise SystemExit(f"{workload.name}: request {index} differs from itself alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names_of("model", SHAPES), default="TINY,SMALL")
    parser.add_argument("--workloads", type=names_of("workload", NAMES), default="W1,W2")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--runs", type=positive, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    record: dict[str, object] = {"machine": machine()}
    for model in arguments.models:
        engine = BenchedEngine(model, dtype=arguments.dtype)
        print(f"\n{model} {arguments.dtype}, loaded in {engine.load_seconds:.1f} s")
        print(Figures.header())
        for name in arguments.workloads:
            workload = make_workload(name, vocab_size=engine.vocab_size)
            runs = []
            for _ in range(arguments.runs):
                figures, tokens = engine.run(workload)
                runs.append(figures)
            check(engine, workload, tokens, exact=arguments.dtype == "float32")
            best = median_run(runs)
            print(best.line(name), flush=True)
            record[f"{model}-{arguments.dtype}-{name}"] = asdict(best)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
