"""End to end: the engine alone, and the same workload through Redis, a worker and a reader.

    python -m benchmarks.bench_service [--models TINY,SMALL] [--dtype bfloat16] [--runs 3]

Runs of the engine alone and of the whole service alternate in one process tree on the same cores.
The share of the service is the median of the ratios of consecutive runs. The processor time of each
process is printed beside it, because all other processes take it from the engine. The gate: each
request has the requested number of tokens, and in float32, where rounding moves nothing, both sides
generate the same tokens.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from redis import Redis

from benchmarks.bench_engine import (
    KV_CACHE_BYTES,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    BenchedEngine,
    check,
)
from benchmarks.common.arguments import names_of
from benchmarks.common.figures import Figures, figures_of, machine, median_run, process_seconds
from benchmarks.common.models import SHAPES, model_folder
from benchmarks.common.workloads import NAMES, Workload, make_workload
from quire import Broker, Client, Completion, LocalRedis, connect
from quire.cli.usage import positive

READY_SECONDS = 180.0
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Cores:
    """Processor time of each process during one run, in seconds."""

    worker: float
    redis: float
    reader: float

    @classmethod
    def now(cls, redis: Redis, worker_pid: int) -> "Cores":
        """The processor time of each process since its start."""
        usage = redis.info("cpu")
        return cls(
            worker=process_seconds(worker_pid),
            redis=usage["used_cpu_user"] + usage["used_cpu_sys"],
            reader=time.process_time(),
        )

    def since(self, before: "Cores") -> "Cores":
        names = (field.name for field in fields(self))
        return Cores(**{name: getattr(self, name) - getattr(before, name) for name in names})

    def line(self) -> str:
        parts = (f"{field.name} {getattr(self, field.name):.2f}" for field in fields(self))
        return f"{'seconds of a core':24} {', '.join(parts)}"


@contextmanager
def worker(
    redis: LocalRedis,
    broker: Broker,
    flags: Mapping[str, str],
    *,
    environment: Mapping[str, str] = os.environ,
    is_leader: bool = False,
) -> Iterator[int]:
    """Starts a worker process for the broker's queue, waits until it is ready, yields its id.

    `flags` maps names without dashes to values; a flag with an empty value has no argument. If
    `is_leader`, it and the processes that it starts are a process group of its id.
    """
    command = [sys.executable, "-m", "service", "--queue", broker.keys.queue]
    for name, value in flags.items():
        command += [f"--{name}", value] if value else [f"--{name}"]
    process = subprocess.Popen(
        command, env={**environment, "QUIRE_REDIS_URL": redis.url}, start_new_session=is_leader
    )
    try:
        give_up = time.monotonic() + READY_SECONDS
        while not any(info.state == "ready" for info in broker.workers()):
            if process.poll() is not None or time.monotonic() > give_up:
                raise SystemExit("the worker did not start")
            time.sleep(POLL_SECONDS)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def flags_of(model: str, *, dtype: str) -> dict[str, str]:
    """Flags of a worker with the same sizes as the engine that runs alone."""
    return {
        "model": str(model_folder(model)),
        "dtype": dtype,
        "max-num-seqs": str(MAX_NUM_SEQS),
        "max-num-batched-tokens": str(MAX_NUM_BATCHED_TOKENS),
        "kv-cache-memory-bytes": str(KV_CACHE_BYTES),
        "no-enable-prefix-caching": "",
        "claim-batch": str(MAX_NUM_SEQS),
        "http-port": "0",
        "log-level": "warning",
    }


def run_service(broker: Broker, workload: Workload) -> tuple[Figures, dict[str, list[int]]]:
    """Submit the workload and read each token when it arrives.

    Returns figures, and the tokens by request.
    """
    requests = [
        {
            "prompt": list(item.prompt_token_ids),
            "sampling": {
                "max_tokens": item.num_output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
            },
        }
        for item in workload.items
    ]
    started = time.perf_counter()
    handles = Client(broker).submit_many(requests)
    names = {handle.request_id: f"{workload.name}-{i}" for i, handle in enumerate(handles)}
    arrivals: dict[str, list[tuple[float, int]]] = {name: [] for name in names.values()}
    tokens: dict[str, list[int]] = {name: [] for name in names.values()}
    pending = dict.fromkeys(names, 0)
    while pending:
        news = broker.read_output(pending, block_seconds=1.0)
        now = time.perf_counter() - started
        for request_id, output in news.items():
            name = names[request_id]
            for item in output:
                if isinstance(item, Completion):
                    del pending[request_id]
                    continue
                arrivals[name].append((now, len(item.token_ids)))
                tokens[name].extend(item.token_ids)
                pending[request_id] = len(tokens[name])
    return figures_of(arrivals), tokens


def compare(model: str, workload_name: str, *, dtype: str, runs: int) -> dict[str, object]:
    """Alternate runs of the engine alone and of the service; prints and returns the figures."""
    engine = BenchedEngine(model, dtype=dtype)
    workload = make_workload(workload_name, vocab_size=engine.vocab_size)
    alone, served, cores = [], [], []
    with LocalRedis.start() as redis, connect(redis.url) as connection:
        broker = Broker(connection, queue=model.lower())
        with worker(redis, broker, flags_of(model, dtype=dtype)) as pid:
            for _ in range(runs):
                figures, expected = engine.run(workload)
                alone.append(figures)
                before = Cores.now(connection, pid)
                figures, tokens = run_service(broker, workload)
                cores.append(Cores.now(connection, pid).since(before))
                served.append(figures)
                check(engine, workload, tokens, exact=False)
                if dtype == "float32" and tokens != expected:
                    raise SystemExit(f"{workload_name}: the service changed the tokens")
    shares = [
        through.output_tokens_per_second / engine_only.output_tokens_per_second
        for engine_only, through in zip(alone, served, strict=True)
    ]
    print(f"\n{model} {dtype} {workload_name}, broker: {redis.kind}")
    print(Figures.header())
    print(median_run(alone).line("engine alone"))
    print(median_run(served).line("through Redis"))
    print(f"{'share of the engine':24} {statistics.median(shares):>9.3f}")
    print(cores[-1].line(), flush=True)
    return {
        "engine": asdict(median_run(alone)),
        "service": asdict(median_run(served)),
        "share": statistics.median(shares),
        "core_seconds": asdict(cores[-1]),
    }


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
        for name in arguments.workloads:
            figures = compare(model, name, dtype=arguments.dtype, runs=arguments.runs)
            record[f"{model}-{arguments.dtype}-{name}"] = figures
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
