"""What the scheduler's choices bring: policies, preemption, kinds of batching, swap and recompute.

    python -m benchmarks.bench_scheduling [--model TINY] [--rounds 3] [--json FILE]

All parts run the engine with a real model. The sides of a part take turns, and each figure is the
median over the rounds. The gate: whatever the side, each request has the tokens that it has alone.

- `sjf`: mean wait and 99th percentile of requests under `sjf` and `fcfs`. They arrive faster than
  they are served, with the lengths of a public trace of a cloud service in mind: most prompts and
  outputs are short, some are long (log-normal).
- `urgent`: all slots run bulk requests when a critical one arrives; steps and time to its start.
- `batching`: tokens per second with `dynamic_batching` on and off.
- `preemption`: the time that a preempted request costs by `swap` and by `recompute`, by its length.
- `fairness`: a tenant submits 1,000 requests to a queue on a Redis, then another one submits 10.
  Seconds until each of the 10 has ended: with fairness by tokens, without it, and alone.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.figures import machine, percentile
from benchmarks.common.models import SHAPES, model_folder
from benchmarks.common.tenants import SharedQueue
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.load.load_runner import load_runner
from engine.request import Priority, Request
from engine.sampling_params import SamplingParams
from quire import Broker, LocalRedis, connect
from quire.cli.usage import positive

MAX_NUM_SEQS = 16
MAX_NUM_BATCHED_TOKENS = 256
#: Requests of the parts `sjf` and `batching`.
NUM_REQUESTS = 96
#: Medians and spreads of the log-normal lengths of prompts and outputs, and the longest of each.
PROMPT_LENGTHS, OUTPUT_LENGTHS = (96, 0.9, 768), (24, 0.9, 256)
#: How many times faster requests arrive than the engine serves them, in the part `sjf`.
OVERLOAD = 3.0
#: Requests of the two tenants of the part `fairness`, their lengths, and the slots of the worker.
NUM_LARGE, NUM_SMALL, NUM_FAIR_SLOTS = 1000, 10, 4
FAIR_PROMPTS, FAIR_OUTPUTS = (32, 0.5, 128), (16, 0.5, 64)
#: Lengths of the preempted request in the part `preemption`.
CONTEXTS = (64, 256, 1024, 4096)

Tokens = dict[str, list[int]]
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt, its number of output tokens, and when it arrives, in seconds."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    arrival: float = 0.0
    priority: Priority = Priority.NORMAL


class Bench:
    """A loaded model, and engines over it."""

    def __init__(self, model: str) -> None:
        self.runner = load_runner(
            model_folder(model),
            dtype="float32",
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            num_blocks=2048,
            num_host_blocks=512,
            now=time.perf_counter,
        )
        facts = self.runner.config_facts
        self.vocab_size = facts.vocab_size
        self.config = EngineConfig(
            num_blocks=facts.num_blocks,
            num_host_blocks=facts.num_host_blocks,
            block_copy_seconds=facts.block_copy_seconds,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            block_size=facts.block_size,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            enable_prefix_caching=False,
        )

    def engine(self, **overrides: Any) -> Engine:
        """An engine that computes with this model; one at a time may have requests."""
        return Engine(replace(self.config, **overrides), self.runner)

    def prompt(self, length: int, draw: random.Random) -> tuple[int, ...]:
        return tuple(draw.randrange(3, self.vocab_size) for _ in range(length))


def request_of(name: str, job: Job, *, arrival: float) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(job.prompt_token_ids),
        sampling=SamplingParams(max_tokens=job.num_output_tokens, temperature=0.0, ignore_eos=True),
        arrival_time=arrival,
        priority=job.priority,
    )


def run(engine: Engine, jobs: Sequence[Job]) -> tuple[float, Tokens, dict[str, Request]]:
    """Seconds, tokens and requests of jobs that arrive at their times."""
    tokens: Tokens = {}
    requests: dict[str, Request] = {}
    waiting = sorted(enumerate(jobs), key=lambda item: item[1].arrival)
    began = time.perf_counter()
    while waiting or engine.has_work():
        now = time.perf_counter()
        while waiting and (waiting[0][1].arrival <= now - began or not engine.has_work()):
            index, job = waiting.pop(0)
            name = f"r{index}"
            # An idle engine takes the next one before its time: nobody else is delayed by it.
            requests[name] = request_of(name, job, arrival=now)
            engine.add_request(requests[name])
        for output in engine.step(time.perf_counter):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return time.perf_counter() - began, tokens, requests


def mixed_jobs(bench: Bench, *, seed: int) -> list[Job]:
    """Jobs with log-normal lengths, all there at once."""
    draw = random.Random(seed)
    return [
        Job(
            bench.prompt(_drawn_length(draw, *PROMPT_LENGTHS), draw),
            _drawn_length(draw, *OUTPUT_LENGTHS),
        )
        for _ in range(NUM_REQUESTS)
    ]


def same_tokens(part: str, sides: Sequence[Tokens]) -> None:
    """The gate; raises SystemExit."""
    if any(side != sides[0] for side in sides):
        raise SystemExit(f"{part}: the tokens of a request depend on the side")


def bench_sjf(bench: Bench, *, turn: int) -> Record:
    jobs = mixed_jobs(bench, seed=turn)
    seconds, expected, _ = run(bench.engine(), jobs)
    draw = random.Random(turn)
    moments = sorted(draw.uniform(0.0, seconds / OVERLOAD) for _ in jobs)
    arriving = [replace(job, arrival=at) for job, at in zip(jobs, moments, strict=True)]
    record: Record = {}
    for policy in ("fcfs", "sjf"):
        _, tokens, requests = run(bench.engine(policy=policy), arriving)
        same_tokens("sjf", [expected, tokens])
        waits = [one.times.first_scheduled - one.times.arrival for one in requests.values()]
        record |= {
            f"{policy} mean wait s": statistics.mean(waits),
            f"{policy} p99 wait s": percentile(waits, 0.99),
        }
    record["sjf mean of fcfs"] = record["sjf mean wait s"] / record["fcfs mean wait s"]
    return record


def bench_urgent(bench: Bench, *, turn: int) -> Record:
    draw = random.Random(turn)
    engine = bench.engine()
    for index in range(MAX_NUM_SEQS):
        job = Job(bench.prompt(64, draw), 200, priority=Priority.LOW)
        engine.add_request(request_of(f"bulk{index}", job, arrival=time.perf_counter()))
    while engine.snapshot().num_running < MAX_NUM_SEQS:
        engine.step(time.perf_counter)
    step_times = [_timed(lambda: engine.step(time.perf_counter)) for _ in range(5)]
    urgent = Job(bench.prompt(64, draw), 1, priority=Priority.CRITICAL)
    request = request_of("urgent", urgent, arrival=time.perf_counter())
    engine.add_request(request)
    steps, began = 0, time.perf_counter()
    while request.times.first_token is None:
        engine.step(time.perf_counter)
        steps += 1
    seconds = time.perf_counter() - began
    while engine.has_work():
        for name in engine.alive_request_ids():
            engine.abort(name)
        engine.step(time.perf_counter)
    _, alone, _ = run(bench.engine(), [urgent])
    same_tokens("urgent", [{"r0": request.output_token_ids}, alone])
    return {
        "steps to the first token": steps,
        "first token ms": 1e3 * seconds,
        "step of the bulk ms": 1e3 * statistics.median(step_times),
    }


def bench_batching(bench: Bench, *, turn: int) -> Record:
    jobs = mixed_jobs(bench, seed=turn)
    speeds, sides = {}, []
    for name, dynamic in (("continuous", True), ("static", False)):
        seconds, tokens, _ = run(bench.engine(dynamic_batching=dynamic), jobs)
        speeds[f"{name} tok/s"] = sum(job.num_output_tokens for job in jobs) / seconds
        sides.append(tokens)
    same_tokens("batching", sides)
    return speeds | {"continuous of static": speeds["continuous tok/s"] / speeds["static tok/s"]}


def bench_preemption(bench: Bench, *, turn: int) -> Record:
    """What a preemption costs: the time of the run with it, less that of the run without."""
    record: Record = {}
    for context in CONTEXTS:
        draw = random.Random(turn)
        victim = Job(bench.prompt(context, draw), 24, priority=Priority.LOW)
        urgent = Job(bench.prompt(8, draw), 4, priority=Priority.CRITICAL)
        sides = []
        for mode in ("swap", "recompute", "auto"):
            engine = bench.engine(max_num_seqs=1, preemption_mode=mode)
            undisturbed, _, _ = run(engine, [victim, replace(urgent, arrival=math.inf)])
            seconds, tokens = _preempted(engine, victim, urgent)
            if (stats := engine.snapshot()).preemptions_swap + stats.preemptions_recompute != 1:
                raise SystemExit("preemption: the victim was not preempted once")
            record[f"{mode} {context} ms"] = 1e3 * (seconds - undisturbed)
            if mode == "auto":
                record[f"auto {context} swaps"] = stats.preemptions_swap
            sides.append(tokens)
        same_tokens("preemption", sides)
    return record


def _preempted(engine: Engine, victim: Job, urgent: Job) -> tuple[float, Tokens]:
    """Seconds and tokens of both; the urgent one arrives when the victim has half of its tokens."""
    tokens: Tokens = {}
    began = time.perf_counter()
    request = request_of("victim", victim, arrival=began)
    engine.add_request(request)
    is_due = True
    while engine.has_work():
        if is_due and request.num_output_tokens >= victim.num_output_tokens // 2:
            is_due = False
            engine.add_request(request_of("urgent", urgent, arrival=time.perf_counter()))
        for output in engine.step(time.perf_counter):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return time.perf_counter() - began, tokens


def bench_fairness(bench: Bench, *, turn: int) -> Record:
    draw = random.Random(turn)

    def jobs(tenant: str, count: int) -> dict[str, tuple[tuple[int, ...], int]]:
        return {
            f"{tenant}{number:04}": (
                bench.prompt(_drawn_length(draw, *FAIR_PROMPTS), draw),
                _drawn_length(draw, *FAIR_OUTPUTS),
            )
            for number in range(count)
        }

    large, small = jobs("large", NUM_LARGE), jobs("small", NUM_SMALL)
    both = large | small
    record: Record = {}
    sides = {}
    with LocalRedis.start() as server, connect(server.url) as connection:
        for side in ("alone", "tokens", "fcfs"):
            broker = Broker(connection, queue=f"{side}-{turn}")
            queue = SharedQueue(broker, by_tokens=side == "tokens")
            if side != "alone":
                queue.submit("large", large)
            queue.submit("small", small)
            served = queue.serve(
                bench.engine(max_num_seqs=NUM_FAIR_SLOTS),
                watched=list(small),
                num_slots=NUM_FAIR_SLOTS,
                request_of=lambda name: request_of(
                    name, Job(*both[name]), arrival=time.perf_counter()
                ),
            )
            sides[side] = {name: served.tokens[name] for name in small}
            seconds = list(served.seconds.values())
            record[f"{side} p99 s"] = percentile(seconds, 0.99)
            record[f"{side} mean s"] = statistics.mean(seconds)
    same_tokens("fairness", list(sides.values()))
    record["tokens p99 of alone"] = record["tokens p99 s"] / record["alone p99 s"]
    record["fcfs p99 of alone"] = record["fcfs p99 s"] / record["alone p99 s"]
    return record


def _drawn_length(draw: random.Random, median: int, spread: float, most: int) -> int:
    return min(most, max(1, round(median * math.exp(draw.gauss(0.0, spread)))))


def _timed(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


PARTS: dict[str, Callable[..., Record]] = {
    "sjf": bench_sjf,
    "urgent": bench_urgent,
    "batching": bench_batching,
    "preemption": bench_preemption,
    "fairness": bench_fairness,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SHAPES), default="TINY")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bench = Bench(arguments.model)
    record: Record = {"machine": machine(), "model": arguments.model}
    for part in arguments.parts.split(","):
        rounds = [PARTS[part](bench, turn=turn) for turn in range(1 + arguments.rounds)][1:]
        figures = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        record[part] = figures
        print(f"\n{part}")
        for name, value in figures.items():
            print(f"  {name:28} {value:10.3f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
