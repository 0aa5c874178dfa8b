"""A whole engine on a device: waiting for each step, or one step ahead; and the workloads."""

import statistics
import time
from dataclasses import asdict, replace
from typing import Any

from benchmarks.bench_engine import check_lengths, run_workload
from benchmarks.bench_gpu.shapes import BenchedModel
from benchmarks.common.figures import median_run
from benchmarks.common.workloads import WorkItem, Workload, make_workload
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.run.model_runner import ModelRunner
from engine.request import Request
from engine.sampling_params import SamplingParams

#: Prompt and output tokens of each request, and the turns of each mode.
PROMPT, TOKENS, TURNS = 16, 48, 3
#: Output tokens of a request that runs alone and together.
ALONE_TOKENS = 24
#: The first run of a workload does not count.
RUNS = 3


def engine_of(runner: ModelRunner) -> Engine:
    """An engine without a prefix cache: runs repeat their prompts."""
    facts = runner.config_facts
    config = EngineConfig(
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        enable_prefix_caching=False,
    )
    return Engine(config, runner)


def waiting_and_ahead(model: BenchedModel, count: int) -> dict[str, Any]:
    """Milliseconds of a step of `count` requests in both modes, in turns.

    Raises:
        ArithmeticError: a request has a wrong number of tokens.
    """
    runner = model.runner
    may_run_ahead = runner._runs_ahead
    seconds: dict[bool, list[float]] = {False: [], True: []}
    _step_seconds(engine_of(model.runner), count)
    try:
        for _ in range(TURNS):
            for ahead, taken in seconds.items():
                # On a CPU no step runs ahead: both modes are the same there.
                runner._runs_ahead = ahead and may_run_ahead
                taken.append(_step_seconds(engine_of(model.runner), count))
    finally:
        runner._runs_ahead = may_run_ahead
    waiting, ahead = (1e3 * statistics.median(seconds[way]) for way in (False, True))
    return {"milliseconds_waiting": waiting, "milliseconds_ahead": ahead}


def _step_seconds(engine: Engine, count: int) -> float:
    """Seconds per step over the steps in which all requests decode."""
    for index in range(count):
        prompt = [7 + (7919 * place + index) % 500 for place in range(PROMPT)]
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(str(index), prompt, sampling, arrival_time=0.0))
    times, num_tokens = [], 0
    while engine.has_work():
        outputs = engine.step(time.perf_counter)
        num_tokens += sum(len(output.token_ids) for output in outputs)
        if len(outputs) == count:
            times.append(time.perf_counter())
    if num_tokens != count * TOKENS:
        raise ArithmeticError(f"{num_tokens} tokens instead of {count} times {TOKENS}")
    return (times[-1] - times[0]) / (len(times) - 1)


def workload_figures(model: BenchedModel, name: str) -> dict[str, Any]:
    """The figures of W1 or W2. SystemExit if a request has a wrong number of tokens."""
    workload, runs = make_workload(name, vocab_size=model.vocab_size), []
    for _ in range(1 + RUNS):
        figures, tokens = run_workload(engine_of(model.runner), workload)
        check_lengths(workload, tokens)
        runs.append(figures)
    return asdict(median_run(runs[1:]))


def same_alone(model: BenchedModel, count: int) -> dict[str, Any]:
    """How many of `count` requests have the same tokens alone and together."""
    whole = make_workload("W1", vocab_size=model.vocab_size).items[:count]
    items = tuple(replace(item, num_output_tokens=ALONE_TOKENS) for item in whole)

    def tokens(*some: WorkItem) -> list[list[int]]:
        return list(run_workload(engine_of(model.runner), Workload("alone", some))[1].values())

    same = sum(tokens(item) == [found] for item, found in zip(items, tokens(*items), strict=True))
    return {"requests": count, "same_alone": same}
